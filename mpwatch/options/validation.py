"""Checks of option values.

Each function that checks an option raises TypeError or ValueError if the value is invalid. The error text contains the name
and the value of the option.
"""

import inspect
import math
import operator
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from numbers import Real

from mpwatch.options.worker_info import RANK_VARIABLES
from mpwatch.os_support.hardware import format_cpus

MAX_PORT = 65535


def is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) <= MAX_PORT


def refuse_unknown(function: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first unknown option, with the known one that is most like it."""
    known = list(known)
    for name in options:
        if name not in known:
            import difflib  # on use, since it is needed in an error only

            close = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"{function}() has no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_word(name: str, value: object, words: Collection[str]) -> None:
    if value is not None and value not in words:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{name} must be {', '.join(map(repr, words))} or None, not {value!r:.200}")


def check_env_mapping(what: str, env: object) -> None:
    """Refuse variables that identify a rank, because only mpwatch may set them. No text has a value: it may be secret."""
    if not isinstance(env, Mapping):
        raise TypeError(f"{what} must be a mapping of strings to strings, not a value of type {type(env).__qualname__}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"{what} must map strings to strings; {name!r} has a value of type {type(value).__qualname__}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{what} has a variable that no environment can hold: {name!r}")
        if name == "MASTER_PORT" and not is_port(value):
            raise ValueError(f"{what} must give MASTER_PORT as a TCP port, a number from 1 to {MAX_PORT}")
        if name in RANK_VARIABLES:
            raise ValueError(f"{what} may not set {name}: it identifies the rank, so mpwatch sets it")


def check_seconds(name: str, value: object, at_least: str) -> None:
    """`at_least` is "0 or more" or "more than 0"."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and at_least == "more than 0"):
        raise ValueError(f"{name} must be a number of seconds, {at_least}, not {value!r}")


def check_optional_seconds(name: str, value: object) -> None:
    """Check that a value is None, or a number of seconds greater than 0."""
    if value is not None:
        check_seconds(name, value, at_least="more than 0")


def check_fraction(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number from 0 to 1, not {value!r}")
    if not 0 <= float(value) <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, not {value!r}")


def check_count(name: str, value: object, at_least: int) -> int:
    """Return a Python or NumPy integer as an int. A bool is no number here."""
    try:
        count = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None:
        raise TypeError(f"{name} must be an int, not {value!r}")
    if count < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value!r}")
    return count


def check_cpus(what: str, cpus: object, allowed: AbstractSet[int]) -> frozenset[int]:
    available = f"; this process may use {format_cpus(allowed)}"
    if isinstance(cpus, str | bytes) or not isinstance(cpus, Iterable):
        raise TypeError(f"{what} must be a set of CPU numbers, not {cpus!r:.200}{available}")
    numbers = frozenset(check_count(f"a CPU in {what}", cpu, at_least=0) for cpu in cpus)
    if not numbers:
        raise ValueError(f"{what} has no CPU{available}")
    if not numbers <= allowed:
        raise ValueError(f"{what} has {format_cpus(numbers - allowed)}{available}")
    return numbers


def is_async(fn: object) -> bool:
    call = getattr(type(fn), "__call__", None)  # noqa: B004  the method itself is wanted
    return any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in (fn, call))


def check_function(name: str, value: object, expected: str) -> None:
    """Check that a value is a function, and not `async def`, since mpwatch calls it and does not await it."""
    if not callable(value) or isinstance(value, type):
        raise TypeError(f"{name} must be {expected}, not {value!r:.200}")
    if is_async(value):
        raise TypeError(
            f"{name} must be an ordinary function; {name_of(value)!r} is async def, which mpwatch would not await"
        )


def name_of(fn: object) -> str:
    name = getattr(fn, "__qualname__", None) or getattr(getattr(fn, "func", None), "__qualname__", None)
    return str(name or type(fn).__qualname__)
