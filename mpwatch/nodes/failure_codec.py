"""Encode failures of ranks as JSON of limited size, and decode the JSON on another node.

json_codec.py encodes every field of ProcessFailure, except the fields in LOCAL_FIELDS.

Instead of an exception, the sender sends an ExceptionGraph with the data that wire/exceptions/encoder.py reads from the
exception. For each exception in the ExceptionGraph, the receiver builds a stand-in. A stand-in is an exception with the
name, text, notes, cause, context, group members, frames and builtin base classes of the original exception. The receiver
does not import or run any code that is named in the received data.

The sender also sends source lines that exist only in memory, such as the lines of a notebook cell. The receiver stores
the sender's source lines under a new file name, such as "<ipython-input-1 on host2>", because a notebook on the receiver's
node can use the same file name.
"""

import builtins
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from mpwatch.nodes.json_codec import MAX_INTEGER, MAX_TEXT, InvalidMessageError, dump_json, from_json, to_json
from mpwatch.results.clean_text import clean_line, clean_text
from mpwatch.results.failure import ProcessFailure
from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.exceptions.decoder import ExceptionNode, build_graph
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.exceptions.tracebacks import Frame, Span

LOCAL_FIELDS: Final[Mapping[str, str]] = {
    "exception": "nodes exchange no pickles, so an ExceptionGraph of the same name is sent instead of the exception",
}
"""The fields of ProcessFailure that other nodes do not get, with the reason. All other fields are sent."""
MAX_FAILURE_BYTES = 1 << 16
MIN_FAILURE_BYTES = 1 << 12  # the smallest allowed limit, since with less there is no room for a cause
MAX_EXCEPTIONS = 100  # of one failure
MIN_EXCEPTION_BYTES = 1000  # one more exception needs this room for its name, its text, and where it was raised
MAX_FRAMES = 200  # of one exception
MAX_NOTES = 50
MAX_BASES = 10
MAX_NAME_BYTES = 200
MAX_PATH_BYTES = 1000
MAX_MAPPING_ENTRIES = 8
MAX_KEY_BYTES = 60
MAX_LINE_NUMBER = 1 << 24  # the largest line number for which a code object is made
MARK_CHARACTERS = 36  # about the length of the mark that says how many characters were left out
BUILTIN_EXCEPTIONS = {
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
}


FRAME_KEYS = ("file", "name", "qualname", "first_line", "line", "module", "is_hidden", "span")
EncodedFrame = tuple[str, str, str, int, int, str, bool, Span | None]  # the values of these keys of a Frame


@dataclass(frozen=True, slots=True)
class EncodedException:
    """`cause`, `context` and `members` are indices in `ExceptionGraph.exceptions`."""

    name: str
    qualname: str
    module: str
    bases: tuple[str, ...]
    text: str
    message: str
    notes: tuple[str, ...]
    frames: tuple[EncodedFrame, ...]
    cause: int | None
    context: int | None
    suppress: bool
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExceptionGraph:
    """An exception with its causes, contexts and group members."""

    exceptions: tuple[EncodedException, ...]
    """The exception itself comes first. The others follow by their distance from it."""
    sources: Mapping[str, str]
    """For each file that exists only in memory, its source lines."""


def encode_failure(failure: ProcessFailure, *, limit: int = MAX_FAILURE_BYTES) -> dict[str, Any]:
    """If it has more than `limit` bytes as JSON, the middle of its texts and the last exceptions are left out."""
    if limit < MIN_FAILURE_BYTES:
        raise ValueError(f"a failure needs at least {MIN_FAILURE_BYTES} bytes, not {limit}")
    names = [field.name for field in fields(failure) if field.name not in LOCAL_FIELDS]
    values = {name: _limit_value(getattr(failure, name)) for name in names}
    has_exception = failure.exception is not None
    # Measure the fields without their texts, then divide the remaining bytes among the texts.
    bytes_left = limit - _json_size(
        {**{name: _encode_without_texts(value) for name, value in values.items()}, "exception": None}
    )
    texts = [text for value in values.values() for text in _list_texts(value)]
    shortened = iter(_shorten_all(texts, bytes_left * 2 // 3 if has_exception else bytes_left))
    values = {name: _replace_texts(value, shortened) for name, value in values.items()}
    encoded: dict[str, Any] = {**to_json(replace(failure, **values), omit=LOCAL_FIELDS), "exception": None}
    if failure.exception is not None:
        encoded["exception"] = to_json(_encode_graph(failure.exception, limit - _json_size(encoded)))
    return encoded


def decode_failure(data: object) -> ProcessFailure:
    """Build a stand-in for the exception. Raises InvalidMessageError, which names the invalid field."""
    if not isinstance(data, dict):
        raise InvalidMessageError(f"ProcessFailure must be a mapping, not {data!r:.80}")
    body = dict(data)
    graph = body.pop("exception", None)
    failure = from_json(ProcessFailure, body, omit=LOCAL_FIELDS)
    if graph is None:
        return failure
    return replace(failure, exception=_rebuild_exception(from_json(ExceptionGraph, graph), failure.hostname))


def limit_total_size(encoded_failures: Iterable[Mapping[str, Any]], limit: int) -> tuple[Mapping[str, Any], ...]:
    """Keep the first failures that fit into `limit` bytes of JSON, but at least one."""
    kept: list[Mapping[str, Any]] = []
    for encoded in encoded_failures:
        limit -= _json_size(encoded)
        if limit < 0 and kept:
            break
        kept.append(encoded)
    return tuple(kept)


# Limit the values of fields.


def _limit_value(value: Any) -> Any:
    """Replace numbers that JSON cannot represent, escape control characters, and limit the entries of a dict."""
    if _is_text(value):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else 0.0
    if isinstance(value, int) and not isinstance(value, bool):
        return _clamp(value, -MAX_INTEGER, MAX_INTEGER)
    if isinstance(value, Mapping):
        entries = list(value.items())[:MAX_MAPPING_ENTRIES]
        return {
            _encode_name(key, MAX_KEY_BYTES) if isinstance(key, str) else key: _limit_value(item) for key, item in entries
        }
    return value


def _list_texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [item for item in value.values() if _is_text(item)]
    return [value] if _is_text(value) else []


def _encode_without_texts(value: Any) -> Any:
    return to_json(_replace_texts(value, iter([""] * len(_list_texts(value)))))


def _replace_texts(value: Any, texts: Iterator[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: next(texts) if _is_text(item) else item for key, item in value.items()}
    return next(texts) if _is_text(value) else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, Enum)


# Encode exceptions within a number of bytes of JSON.


def _encode_graph(error: BaseException, bytes_left: int) -> ExceptionGraph:
    exception_nodes = ExceptionEncoder(error).nodes[:MAX_EXCEPTIONS]
    exceptions: list[EncodedException] = []
    bytes_left -= _json_size({"exceptions": [], "sources": {}})
    for exception in exception_nodes:
        if exceptions and bytes_left < MIN_EXCEPTION_BYTES:
            break
        # the nearest exception gets the most bytes
        encoded = _encode_exception(exception, bytes_left // 2 if exceptions else bytes_left * 2 // 3)
        bytes_left -= _json_size(to_json(encoded)) + 1
        exceptions.append(encoded)
    files = {frame["file"] for exception in exception_nodes[: len(exceptions)] for frame in exception["frames"]}
    sources: dict[str, str] = {}
    for file, text in source_lines.collect_for_files(files).items():
        entry = {_encode_name(file, MAX_PATH_BYTES): clean_text(text)}
        if all(len(lines) <= MAX_TEXT for lines in entry.values()) and _json_size(entry) <= bytes_left:
            sources |= entry
            bytes_left -= _json_size(entry)
    return ExceptionGraph(tuple(_drop_references_beyond(each, len(exceptions)) for each in exceptions), sources)


def _drop_references_beyond(exception: EncodedException, count: int) -> EncodedException:
    """Leave out references to exceptions that are not in the graph, which has `count`."""
    return replace(
        exception,
        cause=exception.cause if exception.cause is not None and exception.cause < count else None,
        context=exception.context if exception.context is not None and exception.context < count else None,
        members=tuple(member for member in exception.members if member < count),
    )


def _encode_exception(exception: ExceptionNode, max_bytes: int) -> EncodedException:
    names = {
        name: _encode_name(exception[name], min(MAX_NAME_BYTES, max_bytes // 8)) for name in ("name", "qualname", "module")
    }
    without_texts = EncodedException(
        **names,
        bases=tuple(exception["bases"][:MAX_BASES]),
        text="",
        message="",
        notes=(),
        frames=_encode_frames(exception["frames"], max_bytes // 3),
        cause=exception["cause"],
        context=exception["context"],
        suppress=exception["suppress"],
        members=tuple(member for member in exception["members"] if member < MAX_EXCEPTIONS),
    )
    texts = [exception["text"], exception["message"], *exception["notes"][: min(MAX_NOTES, max_bytes // 100)]]
    bytes_left = max_bytes - _json_size(to_json(without_texts)) - len(texts)
    text, message, *notes = _shorten_all([clean_text(text) for text in texts], bytes_left)
    return replace(without_texts, text=text, message=message, notes=tuple(notes))


def _encode_frames(frames: list[Frame], bytes_left: int) -> tuple[EncodedFrame, ...]:
    """Leave out frames in the middle, usually of a recursion, if there are more than MAX_FRAMES or `bytes_left`."""
    kept: dict[int, EncodedFrame] = {}
    for number in range(min(len(frames), MAX_FRAMES)):
        index = number // 2 if number % 2 else len(frames) - 1 - number // 2
        frame = frames[index]
        encoded = (
            _encode_name(frame["file"], MAX_PATH_BYTES),
            _encode_name(frame["name"], MAX_NAME_BYTES),
            _encode_name(frame["qualname"], MAX_NAME_BYTES),
            _clamp(frame["first_line"], 0, MAX_LINE_NUMBER),
            _clamp(frame["line"], 0, MAX_LINE_NUMBER),
            _encode_name(frame["module"], MAX_NAME_BYTES),
            frame["is_hidden"],
            frame["span"],
        )
        bytes_left -= _json_size(encoded) + 1
        if bytes_left < 0:
            break
        kept[index] = encoded
    return tuple(kept[index] for index in sorted(kept))


def _shorten_all(texts: Sequence[str], max_bytes: int) -> list[str]:
    """Shorten the longest texts, so that all texts together have at most `max_bytes` bytes of JSON."""
    shortened = list(texts)
    order = sorted(range(len(texts)), key=lambda index: _json_size(texts[index]))
    for done, index in enumerate(order):
        shortened[index] = _shorten(texts[index], max_bytes // (len(order) - done))
        max_bytes -= _json_size(shortened[index])
    return shortened


def _shorten(text: str, max_bytes: int) -> str:
    size = _json_size(text)
    if size <= max_bytes and len(text) <= MAX_TEXT:
        return text
    separator = "\n" if "\n" in text else ""
    keep = min(len(text) * max_bytes // size, MAX_TEXT) - MARK_CHARACTERS
    while keep > 0:
        tail = keep // 2
        mark = f"{separator}[... {len(text) - keep:,} characters ...]{separator}"
        short = text[: keep - tail] + mark + text[len(text) - tail :]
        if _json_size(short) <= max_bytes:
            return short
        keep = keep * 7 // 8  # the ends of this text have more bytes for each character than its middle
    return text[: max(max_bytes - 2, 0) // 4]  # there is no room for the mark. A character has at most four bytes


def _encode_name(raw: str, max_bytes: int) -> str:
    """Shorten a name or path to at most `max_bytes` bytes of JSON, and escape its line breaks and tabs."""
    return _shorten(clean_line(raw), max_bytes)


def _clamp(value: int, least: int, most: int) -> int:
    return min(max(int(value), least), most)


def _json_size(data: object) -> int:
    return len(dump_json(data).encode())


# Rebuild exceptions.


def _rebuild_exception(graph: ExceptionGraph, hostname: str) -> BaseException:
    if not graph.exceptions:
        raise InvalidMessageError("ExceptionGraph.exceptions is empty")
    for index, exception in enumerate(graph.exceptions):
        _check_exception(exception, f"ExceptionGraph.exceptions[{index}]", len(graph.exceptions))
    try:
        TopologicalSorter({index: exception.members for index, exception in enumerate(graph.exceptions)}).prepare()
    except CycleError:
        raise InvalidMessageError("ExceptionGraph.exceptions has a group that is a member of itself") from None
    renamed = {name: f"<{name.strip('<>')} on {hostname}>" for name in graph.sources}
    used_files = {frame[0] for exception in graph.exceptions for frame in exception.frames}
    exception_nodes: list[ExceptionNode] = []
    for exception in graph.exceptions:
        frames = [_decode_frame(frame, renamed) for frame in exception.frames]
        exception_nodes.append({**asdict(exception), "notes": list(exception.notes), "frames": frames})
    try:
        error = build_graph(exception_nodes)
    except (TypeError, ValueError, OverflowError) as wrong:  # no class can have these bases, or no frame such a line
        raise InvalidMessageError(f"ExceptionGraph.exceptions cannot be built: {wrong}") from None
    source_lines.add_to_linecache({renamed[name]: text for name, text in graph.sources.items() if name in used_files})
    return error


def _decode_frame(encoded: EncodedFrame, renamed: Mapping[str, str]) -> Frame:
    frame = dict(zip(FRAME_KEYS, encoded, strict=True))
    return {**frame, "file": renamed.get(encoded[0], encoded[0])}


def _check_exception(exception: EncodedException, path: str, count: int) -> None:
    if not exception.bases:
        raise InvalidMessageError(f"{path}.bases is empty")
    if unknown := set(exception.bases) - BUILTIN_EXCEPTIONS:  # a newer version of Python may have more builtin exceptions
        raise InvalidMessageError(f"{path}.bases must be builtin exceptions, not {min(unknown)!r:.100}")
    for index in (exception.cause, exception.context, *exception.members):
        if index is not None and not 0 <= index < count:
            raise InvalidMessageError(f"{path} refers to exception {index} of {count}")
