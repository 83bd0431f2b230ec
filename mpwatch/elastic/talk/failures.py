"""Failures of ranks for other nodes: as plain data of bounded size, and back, checked as what a stranger may have sent.

The exception crosses as wire/telling.py tells it, link by link, and comes back as stand-ins: classes of the same names that
`except` of the builtin classes catches from which the true ones are derived, with their texts, notes, causes, contexts,
members and frames. Nothing that the data names is imported or run. Frames keep their files, so that their lines are shown
where the same program lies; but what is no source file here never comes to be opened, and source lines that came along
(of notebook cells) get a name of their own, so that no lines of this node's are ever mistaken for those of another.

Imports wire and data. `from_plain` looks up the files that frames name, and opens none.
"""

import builtins
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...results.model import FailureKind, ProcessFailure
from ...wire import sources
from ...wire.exceptions import Link, assemble
from ...wire.frames import Frame
from ...wire.telling import Telling
from . import seal
from .seal import MAX_COUNT, MAX_NUMBER, MAX_TEXT, ForgedError, without_controls, written

__all__ = ["FAILURE_LIMIT", "LEAST_LIMIT", "as_many_as_fit", "from_plain", "to_plain"]

FAILURE_LIMIT = 1 << 16  # bytes of JSON
LEAST_LIMIT = 1 << 12  # with less, there is no room for a cause
MAX_LINKS = 100
MAX_FRAMES = 200  # of one exception
MAX_NOTES = 50
MAX_BASES = 10
MAX_NAME = 200  # characters; when sent, bytes
MAX_HOSTNAME = 255
MAX_PATH = 1000
MAX_FILES = 8
MAX_STREAM = 60
MAX_LINE_NUMBER = 1 << 24  # what a code object is made for
MAX_SOURCE = 1 << 24  # bytes of a file that is worth opening for a line of it
MAX_SIGNAL = 128
MARK = 36  # characters that tell how many have been left out, about
LEAST_LINK = 1000  # bytes that must be free for one more exception: what it is, its text and where it was raised
TEXTS = ("summary", "traceback", "stack", "stderr", "evidence")
FRAME = ("file", "name", "qualified name", "first line", "line", "module", "hidden")
BASES = {name for name, thing in vars(builtins).items() if isinstance(thing, type) and issubclass(thing, BaseException)}


def to_plain(failure: ProcessFailure, *, limit: int = FAILURE_LIMIT) -> dict[str, Any]:
    """The failure as data for JSON. What is too long is shortened in its middle, and what hangs furthest from the exception
    is cut off.

    Args:
        failure: any.
        limit: bytes that it may take as JSON, LEAST_LIMIT or more.
    """
    if limit < LEAST_LIMIT:
        raise ValueError(f"a failure needs at least {LEAST_LIMIT} bytes, not {limit}")
    logs = dict(list(failure.log_files.items())[:MAX_FILES])
    plain: dict[str, Any] = {
        "rank": _within(failure.rank, 0, MAX_COUNT),
        "local_rank": _within(failure.local_rank, 0, MAX_COUNT),
        "pid": None if failure.pid is None else _within(failure.pid, 0, MAX_COUNT),
        "group_rank": None if failure.group_rank is None else _within(failure.group_rank, 0, MAX_COUNT),
        "hostname": _name(failure.hostname, MAX_HOSTNAME),
        "kind": failure.kind.name,
        "exit_code": _within(failure.exit_code, -MAX_COUNT, MAX_COUNT),
        "signal": None if failure.signal is None else _within(failure.signal, 0, MAX_SIGNAL),
        "is_secondary": bool(failure.is_secondary),
        "elapsed": float(failure.elapsed) if 0.0 <= failure.elapsed <= MAX_NUMBER else 0.0,
        **dict.fromkeys(TEXTS, ""),
        "log_files": {_name(name, MAX_STREAM): "" for name in logs},
        "exception": None,
    }
    room = limit - _size(plain)
    texts = [
        *(without_controls(getattr(failure, name)) for name in TEXTS),
        *(_name(path, MAX_PATH) for path in logs.values()),
    ]
    texts = _fitted(texts, room if failure.exception is None else room * 2 // 3)
    plain |= zip(TEXTS, texts, strict=False)
    plain["log_files"] = dict(zip(plain["log_files"], texts[len(TEXTS) :], strict=False))
    if failure.exception is not None:
        plain["exception"] = _told(failure.exception, limit - _size(plain))
    return plain


def from_plain(data: object) -> ProcessFailure:
    """The failure again, with a stand-in for its exception. Raises ForgedError naming what is wrong with it."""
    body = seal.mapping({"a failure": data}, "a failure", limit=100)
    logs = seal.mapping(body, "log_files", limit=MAX_FILES)
    hostname = seal.line(body, "hostname", limit=MAX_HOSTNAME)
    return ProcessFailure(
        rank=seal.count(body, "rank"),
        local_rank=seal.count(body, "local_rank"),
        pid=seal.count(body, "pid") if seal.is_given(body, "pid") else None,
        hostname=hostname,
        group_rank=seal.count(body, "group_rank") if seal.is_given(body, "group_rank") else None,
        kind=FailureKind[seal.choice(body, "kind", FailureKind.__members__)],
        exit_code=seal.count(body, "exit_code", at_least=-MAX_COUNT),
        signal=seal.count(body, "signal", at_most=MAX_SIGNAL) if seal.is_given(body, "signal") else None,
        **{name: seal.text(body, name) for name in TEXTS},
        log_files={seal.line({"a log": name}, "a log", limit=MAX_NAME): seal.line(logs, name) for name in logs},
        is_secondary=seal.flag(body, "is_secondary"),
        elapsed=seal.number(body, "elapsed"),
        exception=_rebuilt(body, hostname) if seal.is_given(body, "exception") else None,
    )


def as_many_as_fit(plains: Iterable[Mapping[str, Any]], limit: int) -> tuple[Mapping[str, Any], ...]:
    """The first of these failures, which together take so many bytes at most; the very first in any case."""
    told: list[Mapping[str, Any]] = []
    for plain in plains:
        limit -= _size(plain)
        if limit < 0 and told:
            break
        told.append(plain)
    return tuple(told)


# Telling: everything within its room, in bytes of JSON.


def _told(error: BaseException, room: int) -> dict[str, Any]:
    links = Telling(error).links[:MAX_LINKS]
    kept: list[Link] = []
    room -= _size({"links": [], "sources": {}})
    for link in links:
        if kept and room < LEAST_LINK:
            break
        plain = _link(link, room // 2 if kept else room * 2 // 3)  # the nearer, the more
        room -= _size(plain) + 1
        kept.append(plain)
    for link in kept:
        for way in ("cause", "context"):
            link[way] = link[way] if link[way] is not None and link[way] < len(kept) else None
        link["members"] = [member for member in link["members"] if member < len(kept)]
    found: dict[str, str] = {}
    for file, text in sources.of_files({frame[0] for link in links[: len(kept)] for frame in link["frames"]}).items():
        entry = {_name(file, MAX_PATH): without_controls(text)}
        if len(text) <= MAX_TEXT and _size(entry) <= room:
            found |= entry
            room -= _size(entry)
    return {"links": kept, "sources": found}


def _link(link: Link, room: int) -> Link:
    plain = {
        **{name: _name(link[name], min(MAX_NAME, room // 8)) for name in ("name", "qualname", "module")},
        "bases": link["bases"][:MAX_BASES],
        "text": "",
        "message": "",
        "notes": [],
        "frames": _frames(link["frames"], room // 3),
        **{name: link[name] for name in ("cause", "context", "suppress")},
        "members": [member for member in link["members"] if member < MAX_LINKS],
    }
    texts = [link["text"], link["message"], *link["notes"][: min(MAX_NOTES, room // 100)]]
    texts = _fitted([without_controls(text) for text in texts], room - _size(plain) - len(texts))
    plain["text"], plain["message"], *plain["notes"] = texts
    return plain


def _frames(frames: list[Frame], room: int) -> list[list[Any]]:
    """The innermost and the outermost of them, in turn until it is full: those in between are a recursion's."""
    kept = {}
    for number in range(min(len(frames), MAX_FRAMES)):
        at = number // 2 if number % 2 else len(frames) - 1 - number // 2
        file, name, qualname, first, line, module, hidden, _ = frames[at]
        names = [_name(file, MAX_PATH), _name(name, MAX_NAME), _name(qualname, MAX_NAME)]
        lines = [_within(first, 0, MAX_LINE_NUMBER), _within(line, 0, MAX_LINE_NUMBER)]
        plain = [*names, *lines, _name(module, MAX_NAME), hidden]
        room -= _size(plain) + 1
        if room < 0:
            break
        kept[at] = plain
    return [kept[at] for at in sorted(kept)]


def _fitted(texts: Sequence[str], room: int) -> list[str]:
    """Shortened so that they fit together: what the short ones leave is for the long ones."""
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


# Checking, and making it again.


def _rebuilt(body: dict[str, Any], hostname: str) -> BaseException:
    told = seal.mapping(body, "exception", limit=100)
    found = seal.mapping(told, "sources", limit=MAX_LINKS * MAX_FRAMES)
    texts = {seal.line({"a source": name}, "a source", limit=MAX_PATH): seal.text(found, name) for name in found}
    raw = seal.items(told, "links", limit=MAX_LINKS)
    if not raw:
        raise ForgedError("exception has no links")
    links = [_checked_link(link, number, len(raw)) for number, link in enumerate(raw)]
    _untangle(links)
    ours = {name: f"<{name.strip('<>')} on {hostname}>" for name in texts}
    files = {frame[0] for link in links for frame in link["frames"]}
    names = {name: ours.get(name) or (name if _may_be_opened(name) else f"<{name}>") for name in files}
    for link in links:
        link["frames"] = [(names[file], *rest) for file, *rest in link["frames"]]
    try:
        error = assemble(links)
    except (TypeError, ValueError) as wrong:  # bases that no class can have together, members that no group can have
        raise ForgedError(f"no exception can be made as it says: {wrong}") from None
    sources.remember({ours[name]: text for name, text in texts.items() if name in files})
    return error


def _checked_link(raw: object, number: int, links: int) -> Link:
    try:
        body = seal.mapping({"it": raw}, "it", limit=100)
        members = seal.items(body, "members", limit=MAX_LINKS)
        bases = [_base(base) for base in seal.items(body, "bases", limit=MAX_BASES)]
        if not bases:
            raise ForgedError("bases is empty")
        notes = seal.items(body, "notes", limit=MAX_NOTES)
        return {
            **{name: seal.line(body, name, limit=MAX_NAME) for name in ("name", "qualname", "module")},
            "bases": bases,
            "text": seal.text(body, "text"),
            "message": seal.text(body, "message"),
            "notes": [seal.text({"a note": note}, "a note") for note in notes],
            "frames": [_frame(frame) for frame in seal.items(body, "frames", limit=MAX_FRAMES)],
            "cause": _index(body, "cause", links) if seal.is_given(body, "cause") else None,
            "context": _index(body, "context", links) if seal.is_given(body, "context") else None,
            "suppress": seal.flag(body, "suppress"),
            "members": [_index({"a member": member}, "a member", links) for member in members],
        }
    except ForgedError as wrong:
        raise ForgedError(f"link {number} of the exception: {wrong}") from None


def _base(raw: object) -> str:
    name = seal.line({"a base": raw}, "a base", limit=MAX_NAME)
    if name not in BASES:
        raise ForgedError(f"a base must be a builtin exception, not {name!r}")
    return name


def _index(body: dict[str, Any], name: str, links: int) -> int:
    return seal.count(body, name, at_most=links - 1)


def _frame(raw: object) -> Frame:
    values = seal.items({"a frame": raw}, "a frame", limit=len(FRAME))
    body = dict(zip(FRAME, values, strict=False))
    return (
        seal.line(body, "file", limit=MAX_PATH),
        seal.line(body, "name", limit=MAX_NAME),
        seal.line(body, "qualified name", limit=MAX_NAME),
        seal.count(body, "first line", at_most=MAX_LINE_NUMBER),
        seal.count(body, "line", at_most=MAX_LINE_NUMBER),
        seal.line(body, "module", limit=MAX_NAME),
        seal.flag(body, "hidden"),
        None,  # the span of columns, which is not sent
    )


def _untangle(links: list[Link]) -> None:
    """Let chains end and groups be a tree, each exception in one of them: who walks or prints others may never be done."""
    for way in ("cause", "context"):
        for start in range(len(links)):
            met, at = {start}, start
            while (after := links[at][way]) is not None and after not in met:
                met.add(after)
                at = after
            links[at][way] = None if after in met else after
    group_of: dict[int, int] = {}
    for number, link in enumerate(links):
        members = link["members"]
        link["members"] = []
        for member in members:
            if member not in group_of and member not in _and_above(number, group_of):
                group_of[member] = number
                link["members"].append(member)


def _and_above(number: int, group_of: dict[int, int]) -> set[int]:
    met = {number}
    while number in group_of:
        number = group_of[number]
        met.add(number)
    return met


def _may_be_opened(file: str) -> bool:
    """Whether `linecache`, which opens what a frame names, finds nothing or a file as those with sources are: a stranger may
    name a device or a pipe, whose lines never end or never come.
    """
    if os.pardir in file.split("/"):  # it looks for it in all folders of sys.path
        return False
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return True
    return stat.S_ISREG(found.st_mode) and 0 < found.st_size <= MAX_SOURCE
