"""`LogEvents` observes every run, and logs events to `logging.getLogger("mpwatch")`.

A restart has the level WARNING, because the ranks lose what they have in memory. RunStarted, RunEnded, RendezvousCompleted,
StateChanged, Stopping and HeartbeatLate have the level INFO. Events such as CallStarted and WorkerExited have the level
DEBUG. The report of a failed run is not logged, because the caller gets the report in an exception.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from mpwatch.events.types import (
    CallStarted,
    CollectivesRecorded,
    Event,
    HeartbeatLate,
    RendezvousCompleted,
    Restarting,
    RunEnded,
    RunStarted,
    StateChanged,
    Stopping,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
    WorkerStopped,
    WorkerSucceeded,
)
from mpwatch.results.clean_text import clean_line
from mpwatch.results.failure import format_exit, format_failure, format_ranks, format_root_cause

log = logging.getLogger("mpwatch")
ID_LENGTH = 8  # characters of the run_id that are logged, enough to distinguish runs


class LogEvents:
    """An observer that logs events. If a logging handler raises an exception, LogEvents gets no more events of this run."""

    def wants(self, kind: type[Event]) -> bool:
        """Return whether LogEvents logs events of the class `kind` at the present log level."""
        return kind in LINES and log.isEnabledFor(LINES[kind][0])

    def __call__(self, event: Event) -> None:
        """Log one event in one line."""
        if self.wants(type(event)):
            level, line = LINES[type(event)]
            text = " ".join(line(event).splitlines())
            log.log(level, "run %s: %s", clean_line(event.run_id)[:ID_LENGTH], clean_line(text))


def _run_started(event: RunStarted) -> str:
    what = f"{event.fn} " if event.fn else "a WorkerGroup "
    return f"{what}starts on {event.hostname}: {_count(event.nprocs, 'rank')} of role {event.role}"


def _run_ended(event: RunEnded) -> str:
    restarts = f", after {_count(event.restarts, 'restart')}" if event.restarts else ""
    reason = f": {event.reason}" if event.reason else ""
    return f"{event.state.name} after {_seconds(event.elapsed)}{restarts}{reason}"


def _rendezvous_completed(event: RendezvousCompleted) -> str:
    node = f"node {event.group_rank} of {event.group_world_size}"
    store = f"[{event.master_addr}]" if ":" in event.master_addr else event.master_addr
    which = f", start {event.attempt + 1}" if event.attempt else ""
    return f"{node}: {_who(event)} of {event.world_size}, store at {store}:{event.master_port}{which}"


def _restarting(event: Restarting) -> str:
    when = f" in {_seconds(event.delay)}" if event.delay else ""
    reason = event.reason if event.cause is None else format_root_cause(event.cause)
    why = f": {reason}" if reason else ""
    count = f"restart {event.attempt + 1}, {event.restarts_left} left" if event.is_counted else "costs no restart"
    return f"restarting {_who(event)}{when} ({count}){why}"


def _stopping(event: Stopping) -> str:
    when = "at its next step" if event.after_step is None else f"after step {event.after_step}"
    return f"{_who(event)}: a stop was requested ({event.stop_cause}), {when}"


def _heartbeat_late(event: HeartbeatLate) -> str:
    return f"{_who(event)}: silent for {_seconds(event.silent_seconds)} of {_seconds(event.heartbeat_timeout)} allowed"


def _worker_started(event: WorkerStarted) -> str:
    return f"{_who(event)}: process {event.pid}" + (f", restart {event.attempt}" if event.attempt else "")


def _worker_failed(event: WorkerFailed) -> str:
    return format_failure(event.failure) + (" (the root cause)" if event.is_root_cause else "")


def _collectives_recorded(event: CollectivesRecorded) -> str:
    last = f", the last one is {event.collectives[-1]}" if event.collectives else ""
    return f"{_who(event)}: {_count(len(event.collectives), 'collective')} recorded{last}"


def _worker_exited(event: WorkerExited) -> str:
    if event.exit_code is None:
        how = "has exited with unknown status"
    else:
        how = "was stopped" if event.was_stopped else format_exit(event.exit_code)
    return f"{_who(event)}: process {event.pid} {how}"


def _who(event: Event) -> str:
    return format_ranks(event.ranks)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _seconds(number: float) -> str:
    return f"{number:.1f} s"


LINES: Mapping[type[Event], tuple[int, Callable[[Any], str]]] = {
    RunStarted: (logging.INFO, _run_started),
    RunEnded: (logging.INFO, _run_ended),
    RendezvousCompleted: (logging.INFO, _rendezvous_completed),
    StateChanged: (logging.INFO, lambda event: f"{event.before.name} -> {event.after.name}"),
    Restarting: (logging.WARNING, _restarting),
    Stopping: (logging.INFO, _stopping),  # the event loop logs a warning
    # INFO, since half of the limit often passes, for example while ranks wait for a rank that writes a checkpoint
    HeartbeatLate: (logging.INFO, _heartbeat_late),
    CallStarted: (logging.DEBUG, lambda event: f"{_who(event)}: a call"),
    WorkerStarted: (logging.DEBUG, _worker_started),
    WorkerReady: (logging.DEBUG, lambda event: f"{_who(event)}: ready"),
    WorkerSucceeded: (logging.DEBUG, lambda event: f"{_who(event)}: returned"),
    WorkerFailed: (logging.DEBUG, _worker_failed),
    WorkerStopped: (logging.DEBUG, lambda event: f"{_who(event)}: stopped by the watcher"),
    CollectivesRecorded: (logging.DEBUG, _collectives_recorded),
    WorkerExited: (logging.DEBUG, _worker_exited),
}
