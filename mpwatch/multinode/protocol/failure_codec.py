"""Encode failures of ranks for other nodes as JSON of limited size, and decode them.

Every field of ProcessFailure is encoded by json_codec.py, except those of LOCAL_FIELDS. Texts that are too long are
shortened in their middle.

An exception is sent as an ExceptionGraph, as wire/telling.py describes it, and becomes a chain of stand-ins: classes with
the same names, texts, notes, causes, contexts, members and frames, derived from the same builtin classes. No code that the
data names is imported or run. Source lines that no file has, of notebook cells, are sent along. They get a file name of
their own, so that lines of this node are never shown for frames of another node.
"""

import builtins
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from mpwatch.multinode.protocol.json_codec import MAX_INTEGER, MAX_TEXT, from_json, to_json, without_controls
from mpwatch.multinode.protocol.signed_json import InvalidEntryError, written
from mpwatch.results.model import ProcessFailure
from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.exceptions.decoder import ExceptionNode, assemble
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.exceptions.tracebacks import Frame

LOCAL_FIELDS: Final[Mapping[str, str]] = {
    "exception": "nodes exchange no pickles, so an ExceptionGraph of the same name is sent instead of the exception",
}
"""The fields of ProcessFailure that other nodes do not get, with the reason. All others are sent."""
FAILURE_LIMIT = 1 << 16  # bytes of JSON
LEAST_LIMIT = 1 << 12  # with less, there is no room for a cause
MAX_LINKS = 100
MAX_FRAMES = 200  # of one exception
MAX_NOTES = 50
MAX_BASES = 10
MAX_NAME = 200  # bytes
MAX_PATH = 1000
MAX_ENTRIES = 8  # of a mapping
MAX_KEY = 60
MAX_LINE_NUMBER = 1 << 24  # the largest line number that a code object is made for
MARK = 36  # characters, about, of the mark that says how many were left out
LEAST_LINK = 1000  # bytes that must be free for one more exception: its name, its text, and where it was raised
BASES = {name for name, thing in vars(builtins).items() if isinstance(thing, type) and issubclass(thing, BaseException)}


@dataclass(frozen=True, slots=True)
class ExceptionLink:
    """One exception of a graph. Other exceptions are named by their index in the graph."""

    name: str
    qualname: str
    module: str
    bases: tuple[str, ...]
    text: str
    message: str
    notes: tuple[str, ...]
    frames: tuple[Frame, ...]
    cause: int | None
    context: int | None
    suppress: bool
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExceptionGraph:
    """An exception, then its causes, contexts and members, the nearest first."""

    links: tuple[ExceptionLink, ...]
    sources: Mapping[str, str]
    """By file: the source lines of files that exist only in memory."""


def to_plain(failure: ProcessFailure, *, limit: int = FAILURE_LIMIT) -> dict[str, Any]:
    """Encode a failure as JSON data. Texts that are too long are shortened, and the furthest causes are cut off.

    Args:
        failure: any.
        limit: bytes that the failure may take as JSON, LEAST_LIMIT or more.
    """
    if limit < LEAST_LIMIT:
        raise ValueError(f"a failure needs at least {LEAST_LIMIT} bytes, not {limit}")
    names = [field.name for field in fields(failure) if field.name not in LOCAL_FIELDS]
    bounded = {name: _bounded(getattr(failure, name)) for name in names}
    has_exception = failure.exception is not None
    # measure the fields without their texts, then divide what is left among the texts
    room = limit - _size({**{name: _without_texts(value) for name, value in bounded.items()}, "exception": None})
    texts = [text for value in bounded.values() for text in _texts_of(value)]
    shortened = iter(_fitted(texts, room * 2 // 3 if has_exception else room))
    bounded = {name: _with_texts(value, shortened) for name, value in bounded.items()}
    plain: dict[str, Any] = {**to_json(replace(failure, **bounded), omit=LOCAL_FIELDS), "exception": None}
    if failure.exception is not None:
        plain["exception"] = to_json(_graph_of(failure.exception, limit - _size(plain)))
    return plain


def from_plain(data: object) -> ProcessFailure:
    """Decode a failure, with a stand-in for its exception. Raises ForgedError naming the bad field."""
    if not isinstance(data, dict):
        raise InvalidEntryError(f"ProcessFailure must be a mapping, not {data!r:.80}")
    body = dict(data)
    graph = body.pop("exception", None)
    failure = from_json(ProcessFailure, body, omit=LOCAL_FIELDS)
    if graph is None:
        return failure
    return replace(failure, exception=_rebuilt(from_json(ExceptionGraph, graph), failure.hostname))


def as_many_as_fit(plains: Iterable[Mapping[str, Any]], limit: int) -> tuple[Mapping[str, Any], ...]:
    """Return the first of these failures, as many as the bytes allow, and at least one."""
    told: list[Mapping[str, Any]] = []
    for plain in plains:
        limit -= _size(plain)
        if limit < 0 and told:
            break
        told.append(plain)
    return tuple(told)


# The values of fields, within their limits.


def _bounded(value: Any) -> Any:
    """Replace numbers that JSON cannot hold, and clean and limit the keys and texts."""
    if _is_text(value):
        return without_controls(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else 0.0
    if isinstance(value, int) and not isinstance(value, bool):
        return _within(value, -MAX_INTEGER, MAX_INTEGER)
    if isinstance(value, Mapping):
        entries = list(value.items())[:MAX_ENTRIES]
        return {_name(key, MAX_KEY) if isinstance(key, str) else key: _bounded(item) for key, item in entries}
    return value


def _texts_of(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [item for item in value.values() if _is_text(item)]
    return [value] if _is_text(value) else []


def _without_texts(value: Any) -> Any:
    return to_json(_with_texts(value, iter([""] * len(_texts_of(value)))))


def _with_texts(value: Any, texts: Iterator[str]) -> Any:
    """Replace each text of the value by the next one."""
    if isinstance(value, Mapping):
        return {key: next(texts) if _is_text(item) else item for key, item in value.items()}
    return next(texts) if _is_text(value) else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, Enum)


# Exceptions, within a number of bytes of JSON.


def _graph_of(error: BaseException, room: int) -> ExceptionGraph:
    links = ExceptionEncoder(error).links[:MAX_LINKS]
    kept: list[ExceptionLink] = []
    room -= _size({"links": [], "sources": {}})
    for link in links:
        if kept and room < LEAST_LINK:
            break
        sent = _node_thread(link, room // 2 if kept else room * 2 // 3)  # nearer exceptions get more room
        room -= _size(to_json(sent)) + 1
        kept.append(sent)
    found: dict[str, str] = {}
    for file, text in source_lines.of_files({frame[0] for link in links[: len(kept)] for frame in link["frames"]}).items():
        entry = {_name(file, MAX_PATH): without_controls(text)}
        if all(len(lines) <= MAX_TEXT for lines in entry.values()) and _size(entry) <= room:
            found |= entry
            room -= _size(entry)
    return ExceptionGraph(tuple(_linked_to(link, len(kept)) for link in kept), found)


def _linked_to(link: ExceptionLink, count: int) -> ExceptionLink:
    """Drop what the link says of exceptions beyond the first ones."""
    return replace(
        link,
        cause=link.cause if link.cause is not None and link.cause < count else None,
        context=link.context if link.context is not None and link.context < count else None,
        members=tuple(member for member in link.members if member < count),
    )


def _node_thread(link: ExceptionNode, room: int) -> ExceptionLink:
    names = {name: _name(link[name], min(MAX_NAME, room // 8)) for name in ("name", "qualname", "module")}
    bare = ExceptionLink(
        **names,
        bases=tuple(link["bases"][:MAX_BASES]),
        text="",
        message="",
        notes=(),
        frames=_frames(link["frames"], room // 3),
        cause=link["cause"],
        context=link["context"],
        suppress=link["suppress"],
        members=tuple(member for member in link["members"] if member < MAX_LINKS),
    )
    texts = [link["text"], link["message"], *link["notes"][: min(MAX_NOTES, room // 100)]]
    texts = _fitted([without_controls(text) for text in texts], room - _size(to_json(bare)) - len(texts))
    return replace(bare, text=texts[0], message=texts[1], notes=tuple(texts[2:]))


def _frames(frames: list[Frame], room: int) -> tuple[Frame, ...]:
    """Keep the innermost and the outermost frames, in turn until the room is used. Those in between are a recursion's."""
    kept: dict[int, Frame] = {}
    for number in range(min(len(frames), MAX_FRAMES)):
        at = number // 2 if number % 2 else len(frames) - 1 - number // 2
        file, name, qualname, first, line, module, hidden, span = frames[at]
        sent = (
            _name(file, MAX_PATH),
            _name(name, MAX_NAME),
            _name(qualname, MAX_NAME),
            _within(first, 0, MAX_LINE_NUMBER),
            _within(line, 0, MAX_LINE_NUMBER),
            _name(module, MAX_NAME),
            hidden,
            span,
        )
        room -= _size(sent) + 1
        if room < 0:
            break
        kept[at] = sent
    return tuple(kept[at] for at in sorted(kept))


def _fitted(texts: Sequence[str], room: int) -> list[str]:
    """Shorten texts so that they fit together. Short ones leave their room to long ones."""
    fitted = list(texts)
    order = sorted(range(len(texts)), key=lambda at: _size(texts[at]))
    for done, at in enumerate(order):
        fitted[at] = _shortened(texts[at], room // (len(order) - done))
        room -= _size(fitted[at])
    return fitted


def _shortened(text: str, room: int) -> str:
    size = _size(text)
    if size <= room and len(text) <= MAX_TEXT:
        return text
    around = "\n" if "\n" in text else ""
    keep = min(len(text) * room // size, MAX_TEXT) - MARK
    while keep > 0:
        tail = keep // 2
        mark = f"{around}[... {len(text) - keep:,} characters ...]{around}"
        short = text[: keep - tail] + mark + text[len(text) - tail :]
        if _size(short) <= room:
            return short
        keep = keep * 7 // 8  # its ends take more than its middle
    return text[: max(room - 2, 0) // 4]  # no room for the mark; four bytes are the most that a character takes


def _name(raw: str, room: int) -> str:
    return _shortened(_line(raw), room)


def _line(raw: str) -> str:
    return without_controls(raw).replace("\n", "\\n").replace("\t", "\\t")


def _within(value: int, least: int, most: int) -> int:
    return min(max(int(value), least), most)


def _size(plain: object) -> int:
    return len(written(plain).encode())


# Exceptions, rebuilt.


def _rebuilt(graph: ExceptionGraph, hostname: str) -> BaseException:
    if not graph.links:
        raise InvalidEntryError("ExceptionGraph.links is empty")
    for number, link in enumerate(graph.links):
        _check_link(link, f"ExceptionGraph.links[{number}]", len(graph.links))
    try:
        TopologicalSorter({number: link.members for number, link in enumerate(graph.links)}).prepare()
    except CycleError:
        raise InvalidEntryError("ExceptionGraph.links has a group that is a member of itself") from None
    own_names = {name: f"<{name.strip('<>')} on {hostname}>" for name in graph.sources}
    used = {frame[0] for link in graph.links for frame in link.frames}
    links: list[ExceptionNode] = []
    for link in graph.links:
        frames = [(own_names.get(file, file), *rest) for file, *rest in link.frames]
        links.append({**asdict(link), "notes": list(link.notes), "frames": frames})
    try:
        error = assemble(links)
    except (TypeError, ValueError, OverflowError) as wrong:  # no class can have these bases, no frame has such a line
        raise InvalidEntryError(f"ExceptionGraph.links make no exception: {wrong}") from None
    source_lines.remember({own_names[name]: text for name, text in graph.sources.items() if name in used})
    return error


def _check_link(link: ExceptionLink, path: str, count: int) -> None:
    if not link.bases:
        raise InvalidEntryError(f"{path}.bases is empty")
    if unknown := set(link.bases) - BASES:  # another version of Python may have more of them
        raise InvalidEntryError(f"{path}.bases must be builtin exceptions, not {min(unknown)!r:.100}")
    for index in (link.cause, link.context, *link.members):
        if index is not None and not 0 <= index < count:
            raise InvalidEntryError(f"{path} refers to exception {index} of {count}")
