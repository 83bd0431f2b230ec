"""Encode failures of ranks as JSON of limited size, and decode the JSON on another node.

The exception of a failure, and each exception that it refers to, is sent as the plain data that wire/exceptions/encoder.py
has read. The receiver builds stand-ins: exceptions with the name, text, notes, cause, context, group members, frames and
builtin base classes of the originals. It does not import or run any code that is named in the received data.
"""

import builtins
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

from mpwatch.nodes.json_codec import InvalidMessageError, dump_json, from_json
from mpwatch.nodes.messages import LostNode
from mpwatch.results.failure import FailureKind, ProcessFailure, add_summary
from mpwatch.results.to_json import to_json
from mpwatch.wire.exceptions.decoder import ExceptionNode, build_graph
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.exceptions.tracebacks import Span

MAX_FAILURE_BYTES = 1 << 16
# Tried one after the other until a failure fits: the characters of a text, of items of a list and of exceptions.
LIMITS = [(1 << bits, 1 << (bits - 6), 1 << (bits - 7)) for bits in range(14, 6, -1)]
MAX_EXCEPTIONS = LIMITS[0][2]
BUILTIN_EXCEPTIONS = {
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
}


class FrameData(TypedDict):
    """A Frame, see wire/exceptions/tracebacks.py."""

    file: str
    name: str
    qualname: str
    first_line: int
    line: int
    module: str
    is_hidden: bool
    span: Span | None


class ExceptionData(TypedDict):
    """An ExceptionNode, see wire/exceptions/decoder.py. `cause`, `context` and `members` are indices of others."""

    name: str
    qualname: str
    module: str
    bases: list[str]
    text: str
    message: str
    notes: list[str]
    frames: list[FrameData]
    cause: int | None
    context: int | None
    suppress: bool
    members: list[int]


def encode_failure(failure: ProcessFailure) -> dict[str, Any]:
    """If it is too large, the middle of its texts and lists and the last exceptions are left out."""
    body = to_json(failure)
    exceptions = [] if failure.exception is None else to_json(ExceptionEncoder(failure.exception).nodes[:MAX_EXCEPTIONS])
    encoded: dict[str, Any] = {}
    for longest, most_items, most_exceptions in LIMITS:
        kept = [_shorten_exception(exception, most_items, most_exceptions) for exception in exceptions[:most_exceptions]]
        encoded = _cut_all({**body, "exception": kept or None}, longest)
        if len(dump_json(encoded)) <= MAX_FAILURE_BYTES:
            break
    return encoded


def _shorten_exception(exception: dict[str, Any], most_items: int, most_exceptions: int) -> dict[str, Any]:
    def keep(index: int | None) -> int | None:
        return index if index is not None and index < most_exceptions else None

    frames, half = exception["frames"], most_items // 2
    return {
        **exception,
        "frames": frames if len(frames) <= most_items else frames[:half] + frames[-half:],  # usually of a recursion
        "notes": exception["notes"][:most_items],
        "cause": keep(exception["cause"]),
        "context": keep(exception["context"]),
        "members": [member for member in exception["members"] if member < most_exceptions],
    }


def _cut_all(data: Any, longest: int) -> Any:
    if isinstance(data, dict):
        return {key: _cut_all(value, longest) for key, value in data.items()}
    if isinstance(data, list):
        return [_cut_all(item, longest) for item in data]
    return _cut(data, longest) if isinstance(data, str) else data


def _cut(text: str, longest: int) -> str:
    """Leave out the middle of a text with more than `longest` characters."""
    if len(text) <= longest:
        return text
    mark = f"[... {len(text) - longest:,} characters ...]"
    mark = f"\n{mark}\n" if "\n" in text else mark
    keep = max(0, longest - len(mark))
    return text[: keep - keep // 2] + mark[:longest] + text[len(text) - keep // 2 :]


def decode_failure(data: Mapping[str, Any]) -> ProcessFailure:
    """Build a stand-in for the exception. Raises InvalidMessageError, which names the invalid field."""
    failure = from_json(ProcessFailure, {**data, "exception": None})
    if (exceptions := data.get("exception")) is None:
        return failure
    return replace(failure, exception=_rebuild_exception(from_json(list[ExceptionData], exceptions, "exception")))


def make_lost_failures(node: LostNode) -> list[ProcessFailure]:
    ranks = tuple(range(node.first_rank, node.first_rank + node.nprocs))
    return [
        add_summary(
            ProcessFailure(
                rank=rank,
                local_rank=local_rank,
                pid=None,
                hostname=node.hostname,
                group_rank=node.group_rank,
                node_ranks=ranks,
                kind=FailureKind.LOST,
                exit_code=1,
                evidence=node.reason,
            )
        )
        for local_rank, rank in enumerate(ranks)
    ]


def limit_total_size(encoded_failures: Iterable[Mapping[str, Any]], limit: int) -> tuple[Mapping[str, Any], ...]:
    """Keep the first failures that fit into `limit` bytes of JSON, but at least one."""
    kept: list[Mapping[str, Any]] = []
    for encoded in encoded_failures:
        limit -= len(dump_json(encoded))
        if limit < 0 and kept:
            break
        kept.append(encoded)
    return tuple(kept)


def _rebuild_exception(exceptions: list[ExceptionData]) -> BaseException:
    nodes: list[ExceptionNode] = []
    for exception in exceptions:
        bases = [base for base in exception["bases"] if base in BUILTIN_EXCEPTIONS]  # a newer Python may have more
        nodes.append({**exception, "bases": bases or ["Exception"]})
    try:
        return build_graph(nodes)
    except (LookupError, TypeError, ValueError, OverflowError) as error:  # such as a group that is a member of itself
        raise InvalidMessageError(f"an exception cannot be built: {error}") from None
