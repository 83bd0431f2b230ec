"""What can happen in a run, as it is told to observers: frozen data, one class for each kind of event.

Made by the watcher, in the caller's process. Times of one run are consistent with each other: `time` is derived from
`monotonic`, and does not jump when somebody sets the clock.
"""

import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from mpwatch.events.to_json import plain
from mpwatch.results.model import ProcessFailure, Progress, WorkerState


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run; the base of all kinds."""

    time: float
    """When it happened, in seconds since 1970 (UTC)."""
    monotonic: float
    """The same by CLOCK_MONOTONIC, in seconds; comparable with all others of this machine, those of the ranks included."""
    run_id: str
    """Of the run; or of the WorkerGroup, in all its calls."""
    ranks: tuple[int, ...]
    """Global ranks that it is about, in order."""
    attempt: int = 0
    """How often these ranks had been started anew before; 0 for the first time."""

    name: ClassVar[str]
    """Of the kind: "worker_started" for WorkerStarted, and so on."""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data that JSON can hold: `event` is the name; states and kinds of failure are their names, an
        exception is its type (`summary` and `traceback` are beside it), and numbers that JSON lacks ("nan", "inf") are text.
        """
        return {"event": self.name} | {field.name: plain(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The run begins: the ranks are about to be started."""

    fn: str
    """The function's name; of a WorkerGroup: empty."""
    role: str
    nprocs: int
    max_restarts: int
    hostname: str


@dataclass(frozen=True, kw_only=True)
class RendezvousCompleted(Event):
    """The nodes of a job have met, and this node's ranks are about to be started. Before that, who they are is not known:
    earlier events of the run have no ranks. Told anew for each attempt.
    """

    job: str
    """The run_id of the Rendezvous, which all nodes have in common; that of the events is this node's own."""
    backend: str
    """Of the rendezvous: "c10d", ..."""
    group_rank: int
    """Of this node."""
    group_world_size: int
    """How many nodes there are."""
    world_size: int
    role_rank: int
    """Of the first of these ranks, among those of their role."""
    role_world_size: int
    master_addr: str
    """Address and port that rank 0 can serve a store on: new ones for each attempt."""
    master_port: int


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """There is a process for this rank."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class WorkerReady(Event):
    """This rank's interpreter can be called."""


@dataclass(frozen=True, kw_only=True)
class CallStarted(Event):
    """A function is called in these ranks, in each as soon as it is ready. One event for all of them, or, with
    scope="worker", one for each; once in a run, however often they are started again.
    """


@dataclass(frozen=True, kw_only=True)
class HeartbeatLate(Event):
    """This rank has been silent for half as long as it may: the group is UNHEALTHY until it beats again, or has failed."""

    silent_seconds: float
    heartbeat_timeout: float
    """The limit, in seconds."""


@dataclass(frozen=True, kw_only=True)
class WorkerSucceeded(Event):
    """This rank's function has returned. WorkerFailed may follow: it is killed while others need it, say."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailed(Event):
    """This rank has failed, for itself or as a victim. Told when all ranks have been stopped and it is known who failed
    first; `time` is when it failed: for a silent rank, when it was last heard of.
    """

    failure: ProcessFailure
    is_root_cause: bool


@dataclass(frozen=True, kw_only=True)
class WorkerStopped(Event):
    """This rank was stopped by the watcher, since another had failed or the run was interrupted."""


@dataclass(frozen=True, kw_only=True)
class WorkerExited(Event):
    """This rank's process has ended, whatever became of its function."""

    pid: int | None
    exit_code: int | None
    """As multiprocessing has it, negative for a signal; None if it is not known."""
    heartbeat_at: float | None = None
    """When it was last heard of, by CLOCK_MONOTONIC; None if it has never beaten, or its function had returned."""
    progress: Progress | None = None
    """What it last reported."""
    reported_at: float | None = None
    """When it did, by CLOCK_MONOTONIC."""
    was_stopped: bool = False
    """Whether the watcher had sent it the signal that it died of."""


@dataclass(frozen=True, kw_only=True)
class Restarting(Event):
    """These ranks, all or one, have failed or were stopped; they are gone, and are started anew after the delay."""

    cause: ProcessFailure | None
    """What failed first in them."""
    delay: float
    """Seconds until they are started."""
    restarts_left: int
    """How often that may happen again."""
    reason: str = ""
    """In a job of several nodes, if no rank failed: why, such as that other nodes have come."""


@dataclass(frozen=True, kw_only=True)
class StateChanged(Event):
    """The state of the group has changed. See mpwatch/results/state_transitions.py for which changes there are."""

    before: WorkerState
    after: WorkerState


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """All is over, and nothing of the ranks is left."""

    state: WorkerState
    """SUCCEEDED, FAILED or STOPPED."""
    elapsed: float
    """Seconds since RunStarted."""
    restarts: int
    """How often ranks were started anew."""
    reason: str
    """What went wrong, in a line; empty after a success."""
