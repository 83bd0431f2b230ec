"""Checks of option values. Each check raises TypeError or ValueError, which names the option and the value."""

import inspect
import math
import operator
import os
import signal
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from numbers import Real
from types import FunctionType

from mpwatch.options.worker_info import RANK_VARIABLES
from mpwatch.os_support.cpu_affinity import format_cpus
from mpwatch.os_support.processes import read_process_state
from mpwatch.os_support.signals import get_handler

MAX_PORT = 65535


def is_port(text: str) -> bool:
    """Return whether a text is the number of a TCP port."""
    return text.isdecimal() and 0 < int(text) <= MAX_PORT


def check_flag(name: str, value: object) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_env_mapping(what: str, env: object) -> None:
    """Check that a value maps names of environment variables to strings, and sets none of the variables of mpwatch."""
    if not isinstance(env, Mapping):
        raise TypeError(f"{what} must be a mapping of strings to strings, not {env!r:.200}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"{what} must map strings to strings, not {name!r} to {value!r:.200}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{what} has a variable that no environment can hold: {name!r}={value!r:.200}")
        try:
            os.fsencode(name + value)
        except UnicodeEncodeError:
            raise ValueError(f"{what} has a variable that cannot be encoded: {name!r}={value!r:.200}") from None
        if name == "MASTER_PORT" and not is_port(value):
            raise ValueError(f"{what} must give MASTER_PORT as a TCP port, not {value!r}")
        if name in RANK_VARIABLES:
            raise ValueError(f"{what} may not set {name}={value!r}: it identifies the rank, so mpwatch sets it")


def check_seconds(name: str, value: object, at_least: str) -> None:
    """Check that a value is a number of seconds. `at_least` is "0 or more" or "more than 0"."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    seconds = _float(value)
    if not math.isfinite(seconds) or seconds < 0 or (value == 0 and at_least == "more than 0"):
        raise ValueError(f"{name} must be a number of seconds, {at_least}, not {value!r}")


def _float(number: Real) -> float:
    try:
        return float(number)
    except OverflowError:  # an int has no upper limit
        return math.inf


def check_fraction(name: str, value: object) -> None:
    """Check that a value is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number from 0 to 1, not {value!r}")
    if not 0 <= _float(value) <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, not {value!r}")


def as_int(value: object) -> int | None:
    """Convert an integer of Python or NumPy to an int. None: it is not an integer, or it is a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_count(name: str, value: object, at_least: int) -> int:
    """Check that a value is an integer of at least `at_least`, and return it as an int."""
    count = as_int(value)
    if count is None:
        raise TypeError(f"{name} must be an int, not {value!r}")
    if count < at_least:
        raise ValueError(f"{name} must be at least {at_least}, not {value!r}")
    return count


def check_signals(name: str, value: object, refused: Collection[int]) -> tuple[int, ...]:
    """Check that a value is a collection of signals whose handlers this process can replace. Return their numbers."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be signals, such as (signal.SIGUSR1,), not {value!r:.200}")
    numbers = []
    for item in value:
        number = as_int(item)
        if number is None:
            raise TypeError(f"{name} must be signals, such as (signal.SIGUSR1,), not {item!r:.200}")
        if number not in signal.valid_signals() or number in {signal.SIGKILL, signal.SIGSTOP, *refused}:
            raise ValueError(f"{name} cannot have {_name_signal(number)}: {_explain_refusal(number)}")
        if _is_handled_in_c(number):
            raise ValueError(
                f"{name} cannot have {_name_signal(number)}: C code of this program handles it (as faulthandler.register "
                "does), and mpwatch could not give it back; choose another signal"
            )
        numbers.append(number)
    return tuple(dict.fromkeys(numbers))


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _explain_refusal(number: int) -> str:
    if number not in signal.valid_signals():
        return "there is no such signal"
    if number in (signal.SIGKILL, signal.SIGSTOP):
        return "no program can catch it"
    return "mpwatch, the terminal or the kernel uses it for something else"


def _is_handled_in_c(number: int) -> bool:
    """Return whether the kernel knows of a handler of this process that Python does not know of."""
    if callable(get_handler(number)):
        return False
    state = read_process_state(os.getpid())
    return state is not None and state.catches(number)


def check_cpus(what: str, cpus: object, allowed: AbstractSet[int]) -> frozenset[int]:
    """Check that a value is a set of numbers of allowed CPUs, or any other iterable of them, and return the set."""
    available = f"; this process may use {format_cpus(allowed)}"
    if isinstance(cpus, str | bytes) or not isinstance(cpus, Iterable):
        raise TypeError(f"{what} must be a set of CPU numbers, not {cpus!r:.200}{available}")
    numbers = set()
    for cpu in cpus:
        number = as_int(cpu)
        if number is None:
            raise TypeError(f"{what} must be a set of CPU numbers, but it has {cpu!r:.200}{available}")
        numbers.add(number)
    if not numbers:
        raise ValueError(f"{what} has no CPU{available}")
    if not numbers <= allowed:
        raise ValueError(f"{what} has {format_cpus(numbers - allowed)}{available}")
    return frozenset(numbers)


def is_async(fn: object) -> bool:
    """Return whether a call of this function only makes a coroutine, which mpwatch would not run."""
    if type(fn) is FunctionType and not vars(fn):  # no decorator has marked it
        return bool(fn.__code__.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))
    call = getattr(type(fn), "__call__", None)  # noqa: B004  the method itself is wanted
    return any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in (fn, call))
