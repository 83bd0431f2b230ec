"""`StopPolicy` says when the ranks are asked to save their state and return, and how long they may take."""

import signal
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass

from mpwatch.options.validation import check_count, check_optional_seconds
from mpwatch.os_support.signals import NATIVE_DUMP_SIGNAL, PYTHON_DUMP_SIGNAL, SIGNALS, name_signal

# Signals that cannot request a stop, each with the reason.
RESERVED_SIGNALS: Mapping[int, str] = {
    **dict.fromkeys((signal.SIGKILL, signal.SIGSTOP), "no program can handle it"),
    signal.SIGQUIT: "it asks for the stacks of all ranks",
    signal.SIGTSTP: "it suspends the ranks together with this program",
    signal.SIGCONT: "it continues the ranks together with this program",
    signal.SIGCHLD: "the kernel sends it when a child process ends",
    **{number: "mpwatch asks a rank for its stacks by it" for number in (PYTHON_DUMP_SIGNAL, NATIVE_DUMP_SIGNAL) if number},
}


@dataclass(frozen=True)
class StopPolicy:
    """When the ranks are asked to stop together. `stop=(signal.SIGUSR1,)` means `stop=StopPolicy((signal.SIGUSR1,))`.

    After a request to stop, `mpwatch.should_stop(step)` becomes True on all ranks at the same step. They save their state
    and return, the run succeeds, and `result.stopped_at` is that step. `mpwatch.request_stop()` requests a stop, too. Ranks
    that fail after the request are not restarted.

    Args:
        signals: signals to this process that request a stop, such as (signal.SIGUSR1, signal.SIGTERM). The first one does
            nothing else in this process. If the same signal comes again, mpwatch stops the ranks as after SIGTERM (as after
            Ctrl-C if the signal is SIGINT). The signal then has its usual effect on this process. After the first signal,
            the other signals of this option have no effect. The run must be called in the main thread, since Python runs
            signal handlers there. The ranks ignore these signals, except SIGTERM and SIGINT, because some schedulers send
            them to all processes. In a job of several nodes, a signal to one node requests a stop of the ranks of all
            nodes, if the nodes have already joined one another. A WorkerGroup handles the signals only while the main thread
            is in its method `run`.
        after: seconds from the start of the run until mpwatch requests a stop. None means never.
        timeout: seconds from the request until all ranks must have returned. After that the ranks are stopped: as after a
            second signal if a signal requested the stop, otherwise as after the option `timeout` of the run. None means no
            limit.

    Raises TypeError or ValueError if an argument is invalid.
    """

    signals: Collection[int] = ()
    _: KW_ONLY
    after: float | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "signals", _check_signals(self.signals))
        check_optional_seconds("StopPolicy: after", self.after)
        check_optional_seconds("StopPolicy: timeout", self.timeout)


def _check_signals(value: object) -> tuple[int, ...]:
    """Return the numbers without duplicates."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise TypeError(f"stop must be a tuple of signals, such as (signal.SIGUSR1,), not {value!r:.200}")
    numbers = dict.fromkeys(check_count("a signal in stop", element, at_least=1) for element in value)
    for number in numbers:
        if number not in SIGNALS:
            raise ValueError(f"stop may not have {number}: no signal of this system has this number; see `kill -l`")
        if number in RESERVED_SIGNALS:
            raise ValueError(f"stop may not have {name_signal(number)}: {RESERVED_SIGNALS[number]}; leave it out")
    return tuple(numbers)
