"""Pack a call for the ranks. If the call cannot be sent, the error names the part that cannot be pickled."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.options.per_rank import find_per_rank, format_argument
from mpwatch.options.spec import WorkerSpec
from mpwatch.options.validation import name_of
from mpwatch.wire.pickling import unpicklable
from mpwatch.wire.pickling.call_payload import FunctionCall, Payload, pack
from mpwatch.wire.resource_errors import is_resource_shortage, with_remedy


def pack_call(call: FunctionCall) -> Payload:
    _split_call(call)
    return _pack(call, partial(_name_parts, call))


def pack_spec(spec: WorkerSpec[Any]) -> Payload:
    backend = spec.torch_backend
    return pack_call(
        FunctionCall(spec.fn, tuple(spec.args), spec.kwargs or {}, backend.name, backend_timeout=backend.timeout)
    )


def pack_items(fn: Callable[..., Any], items: Mapping[str, Any]) -> Payload:
    """Pack a call with items of `mpwatch.map`. Raises LaunchError, which names the item that cannot be packed."""
    return _pack(FunctionCall(fn, tuple(items.values()), {}, None), items.items)


def _split_call(call: FunctionCall) -> None:
    """Move the values of PerRank arguments to `parts`, one dict for each rank."""
    found = find_per_rank(call.args, call.kwargs)
    if found:
        values = zip(*(each.values for each in found.values()), strict=True)
        call.parts = [dict(zip(found, part, strict=True)) for part in values]
        call.args = tuple(None if key in found else value for key, value in enumerate(call.args))
        call.kwargs = {key: None if key in found else value for key, value in call.kwargs.items()}


def _name_parts(call: FunctionCall) -> list[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = [(f"fn {name_of(call.fn)!r}", call.fn)]
    parts += [(format_argument(position), value) for position, value in enumerate(call.args)]
    parts += [(format_argument(name), value) for name, value in call.kwargs.items()]
    for rank, part in enumerate(call.parts):
        parts += [(f"{format_argument(key)}.values[{rank}]", value) for key, value in part.items()]
    return parts


def _pack(call: FunctionCall, name_parts: Callable[[], Iterable[tuple[str, Any]]]) -> Payload:
    try:
        return pack(call)
    except Exception as error:
        raise LaunchError(_explain_failure(name_parts(), error)) from error


def _explain_failure(parts: Iterable[tuple[str, Any]], error: Exception) -> str:
    if is_resource_shortage(error):  # no argument is to blame, and each one that is tried now would fail, too
        return with_remedy("the call could not be packed", error)
    named = list(parts)
    found = unpicklable.find_refused([value for _, value in named], is_call=True)
    if found is None:
        return f"the call cannot be sent to the ranks: {type(error).__name__}: {error}"
    part, reason = found
    path = unpicklable.find_path(named, part)
    if path is None:  # pickling has made the part
        path = f"{next(name for name, value in named if unpicklable.find_refused(value, is_call=True))} holds something"
    link = ", a" if path.startswith("fn ") else " is a"
    return (
        f"{path}{link} {type(part).__module__}.{type(part).__qualname__}, which cannot be sent to the ranks "
        f"({type(reason).__name__}: {reason}); create it inside the function, or pass what it is made from"
    )
