"""Check that a function takes the arguments of a call, before any rank is started or called."""

import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

PER_RANK_ADVICE = (
    "Every rank gets the same args; for values that differ from rank to rank pass a PerRank: args=(PerRank([a, b]),)"
)


def check_signature(
    fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], advice: str = PER_RANK_ADVICE
) -> None:
    """Raise TypeError if `fn` does not take these arguments. `advice` ends the text.

    Nothing is checked if `fn` has `__signature__`, which a decorator may have copied from a function with other arguments.
    """
    if (not kwargs and _takes_positional(fn, len(args))) or "__signature__" in getattr(fn, "__dict__", {}):
        return
    try:
        signature = inspect.signature(fn, follow_wrapped=False)  # a wrapped function may take other arguments than fn
    except Exception:  # noqa: BLE001  fn may be written in C; or it runs code of the user, which may raise anything
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"fn {name}{_format_signature(signature)} cannot be called with these args and kwargs: {error}. {advice}"
        ) from None


def _takes_positional(fn: Any, count: int) -> bool:
    """This is faster than `inspect.signature`."""
    if type(fn) is not FunctionType:
        return False
    code = fn.__code__
    has_limit = not code.co_flags & inspect.CO_VARARGS
    return (
        count >= code.co_argcount - len(fn.__defaults__ or ())
        and not (has_limit and count > code.co_argcount)
        and len(fn.__kwdefaults__ or ()) == code.co_kwonlyargcount
    )


def _format_signature(signature: inspect.Signature) -> str:
    try:
        return str(signature)[:200]
    except Exception:  # noqa: BLE001  it has the repr of default values
        return ""
