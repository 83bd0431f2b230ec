"""Packs a call, and says of one that cannot be sent which part of it is to blame."""

from typing import Any

from mpwatch.errors import LaunchError
from mpwatch.options.spec import name_of
from mpwatch.wire.pickling import unpicklable
from mpwatch.wire.pickling.call_payload import Call, Payload, pack, probe
from mpwatch.wire.resource_errors import is_shortage, with_remedy


def pack_call(call: Call) -> Payload:
    """This call, ready for any number of ranks. Raises LaunchError."""
    try:
        return pack(call)
    except Exception as error:
        raise LaunchError(_why_not_sent(call, error)) from error


def _why_not_sent(call: Call, error: Exception) -> str:
    if is_shortage(error):  # which is nobody's fault, and would befall whatever is tried out now
        return with_remedy("the call could not be packed", error)
    candidates: list[tuple[str, Any]] = [(f"fn {name_of(call.fn)!r}", call.fn)]
    candidates += [(f"args[{i}]", arg) for i, arg in enumerate(call.args)]
    candidates += [(f"kwargs[{name!r}]", value) for name, value in call.kwargs.items()]
    for name, thing in candidates:
        if not _can_be_sent(thing):
            path, part = unpicklable.find(name, thing, probe)
            kind = f"{type(part).__module__}.{type(part).__qualname__}"
            return (
                f"{path}, a {kind}, which cannot be sent to the ranks ({type(error).__name__}: {error}); "
                "create it inside the function, or pass what it is made from"
            )
    return f"the call cannot be sent to the ranks: {type(error).__name__}: {error}"


def _can_be_sent(thing: Any) -> bool:
    try:
        probe(thing)
    except Exception:  # noqa: BLE001  that it fails is what we ask
        return False
    return True
