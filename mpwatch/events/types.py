"""The events of a run. Each kind of event is a frozen dataclass, and `str(event)` is its line in the log.

ARCHITECTURE.md says how to add an event.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mpwatch.results.collective import Collective
from mpwatch.results.failure import ProcessFailure, format_exit, format_failure
from mpwatch.results.model import Lateness, Progress, WorkerState, format_end
from mpwatch.results.texts import format_count, format_ranks
from mpwatch.results.to_json import to_json

DEBUG, INFO, WARNING = 10, 20, 30  # the levels of the package logging, which `import mpwatch.events` does not load


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base class of all events. `str(event)` is a line about the event, as in the log.

    Attributes:
        time: the time of the event in seconds since 1970 (UTC). A change of the system clock during the run has no effect
            on it, since it is computed from `monotonic`.
        monotonic: the time of the event in seconds of CLOCK_MONOTONIC. All processes of a machine share this clock.
        run_id: identifier of the run. All calls of a WorkerGroup have the identifier of the group.
        ranks: the global ranks concerned, in ascending order.
        attempt: how many times these ranks were restarted before. It is 0 after their first start.
    """

    time: float
    monotonic: float
    run_id: str
    ranks: tuple[int, ...]
    attempt: int = 0

    name: ClassVar[str]
    """The name of the kind of event, such as "worker_started" for WorkerStarted."""
    log_level: ClassVar[int] = 0  # 0: it is not logged
    _text: ClassVar[str] = ""  # of `str(event)`, if it is always the same

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def to_dict(self) -> dict[str, Any]:
        """Return the event as data for JSON.

        The value of the key "event" says which kind of event it is, for example "run_started". A WorkerState or a
        FailureKind is replaced by its name, such as "HEALTHY" or "HANG". An exception is replaced by the name of its type.
        In the dict of a failure, `summary` and `traceback` have the text of the exception. A number that JSON cannot
        represent is replaced by a text, such as "nan" or "inf".
        """
        return {"event": self.name, **to_json(self)}

    def __str__(self) -> str:
        return f"{self._who}: {self._text or self.name}"

    @property
    def _who(self) -> str:
        return format_ranks(self.ranks)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The run has begun, and the watcher will start the ranks.

    Attributes:
        fn: name of the function. It is empty for a WorkerGroup.
        role: the option `role`.
        nprocs: number of ranks that this node starts.
        max_restarts: the number of restarts that the option `max_restarts` allows.
        hostname: name of this machine.
        options: the options that differ from the defaults, as a text. `env` is left out.
    """

    fn: str
    role: str
    nprocs: int
    max_restarts: int
    hostname: str
    options: str = ""
    log_level = INFO

    def __str__(self) -> str:
        what = self.fn or "a WorkerGroup"
        return f"{what} starts on {self.hostname}: {format_count(self.nprocs, 'rank')} of role {self.role}"


@dataclass(frozen=True, kw_only=True)
class RendezvousCompleted(Event):
    """The nodes of a job have met, and this node will start its ranks.

    Each attempt of the job has one RendezvousCompleted. In events before the first RendezvousCompleted, the field `ranks` is
    empty, because this node does not know its ranks yet.

    Attributes:
        job: `Rendezvous.run_id`.
        group_rank: index of this node, from 0.
        group_world_size: number of nodes.
        world_size: number of ranks of the job.
        role_rank: number of the first rank of this node among the ranks of the same role.
        role_world_size: number of ranks of the same role.
        master_addr: address where rank 0 can serve a store.
        master_port: port where rank 0 can serve a store. Each attempt has a new port.
    """

    job: str
    group_rank: int
    group_world_size: int
    world_size: int
    role_rank: int
    role_world_size: int
    master_addr: str
    master_port: int
    log_level = INFO

    def __str__(self) -> str:
        store = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        which = f", start {self.attempt + 1}" if self.attempt else ""
        node = f"node {self.group_rank} of {self.group_world_size}"
        return f"{node}: {self._who} of {self.world_size}, store at {store}:{self.master_port}{which}"


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """The process of this rank was started.

    Attributes:
        pid: process id of the rank.
    """

    pid: int
    log_level = DEBUG

    def __str__(self) -> str:
        return f"{self._who}: process {self.pid}" + (f", restart {self.attempt}" if self.attempt else "")


@dataclass(frozen=True, kw_only=True)
class WorkerReady(Event):
    """The Python interpreter of this rank has started, and waits for the call of a function."""

    log_level = DEBUG
    _text = "ready"


@dataclass(frozen=True, kw_only=True)
class CallStarted(Event):
    """A call of a function has begun in these ranks. Each rank calls the function as soon as the rank is ready.

    A call has one CallStarted for all of its ranks. In a run with scope="worker", a call has a separate CallStarted for each
    of its ranks. If restarted ranks call the function again, there is no new CallStarted.
    """

    log_level = DEBUG
    _text = "a call"


@dataclass(frozen=True, kw_only=True)
class HeartbeatLate(Event):
    """This rank sent no heartbeat for half of `heartbeat_timeout`.

    The state of the run or the WorkerGroup is UNHEALTHY while the heartbeat of any rank is late.

    Attributes:
        silent_seconds: seconds since the last heartbeat.
        heartbeat_timeout: the limit, in seconds.
    """

    silent_seconds: float
    heartbeat_timeout: float
    log_level = INFO  # half of the limit often passes, for example while ranks wait for a checkpoint

    def __str__(self) -> str:
        return f"{self._who}: silent for {self.silent_seconds:.1f} s of {self.heartbeat_timeout:.1f} s allowed"


@dataclass(frozen=True, kw_only=True)
class SlowRank(Event):
    """The other ranks often wait for this rank in collectives of torch.distributed. The run goes on.

    SlowRank is published once for a rank, and again if another rank becomes the slow one: as soon as the rank is known and a
    check has found where it is, or without a place after 40 checks. It needs torch 2.13, ranks on one node, and a
    `Backend(stall_after=...)` that is not None.

    Attributes:
        lateness: how long the others wait, and where the rank was meanwhile.
    """

    lateness: Lateness
    log_level = WARNING

    def __str__(self) -> str:
        return str(self.lateness)


@dataclass(frozen=True, kw_only=True)
class Progressed(Event):
    """This rank has called `mpwatch.report()`.

    Only the functions of the option `on_progress` receive Progressed events.

    The watcher reads the last report of each rank four times a second, and once more at the end of the call. If a rank
    reports several times before the watcher reads the reports again, only the last report causes a Progressed event. The
    `time` of a Progressed event is the time of the report. `result.events` does not contain Progressed events.

    Attributes:
        step: number of steps done, or None if the rank has not reported this number.
        total: number of all steps, or None if the rank has not reported this number.
        metrics: the other numbers, by name.
    """

    step: int | None
    total: int | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class WorkerSucceeded(Event):
    """The function of this rank has returned.

    A rank can have a WorkerSucceeded and later a WorkerFailed. A rank that has returned can still fail while other ranks run
    the function. For example, a signal can kill the rank.
    """

    log_level = DEBUG
    _text = "returned"


@dataclass(frozen=True, kw_only=True)
class WorkerFailed(Event):
    """This rank has failed. The failure can be a consequence of another rank's failure.

    In a run, WorkerFailed is published after the end of the attempt, when mpwatch knows the root cause. In a WorkerGroup,
    WorkerFailed is published after the end of the call. The `time` of a WorkerFailed event is the time of the failure. If
    the rank has hung, `time` is the time of its last heartbeat.

    Attributes:
        failure: what is known about the failure.
        is_root_cause: whether this failure is the first one of the attempt, and not the consequence of another failure.
    """

    failure: ProcessFailure
    is_root_cause: bool
    log_level = DEBUG

    def __str__(self) -> str:
        return format_failure(self.failure) + (" (the root cause)" if self.is_root_cause else "")


@dataclass(frozen=True, kw_only=True)
class WorkerStopped(Event):
    """The watcher stopped this rank, because another rank had failed or the run was stopped."""

    log_level = DEBUG
    _text = "stopped by the watcher"


@dataclass(frozen=True, kw_only=True)
class CollectivesRecorded(Event):
    """The latest torch.distributed collectives of this rank, as recorded by torch's flight recorder.

    The watcher reads the collectives at the first sign of a failure, and `time` is the time of this reading. In a run,
    CollectivesRecorded is published after the end of the attempt. In a WorkerGroup, CollectivesRecorded is published after
    the end of the call. A rank has no CollectivesRecorded if it has not used torch.distributed, or if it could not send its
    collectives.

    Attributes:
        collectives: the collectives, with the oldest first. The field `seconds` of each says how long before `time` the rank
            had called it.
    """

    collectives: tuple[Collective, ...]
    log_level = DEBUG

    def __str__(self) -> str:
        last = f", the last one is {self.collectives[-1]}" if self.collectives else ""
        return f"{self._who}: {format_count(len(self.collectives), 'collective')} recorded{last}"


@dataclass(frozen=True, kw_only=True)
class WorkerExited(Event):
    """The process of this rank has exited.

    Attributes:
        pid: process id of the rank.
        exit_code: exit code as in multiprocessing, which is negative for a signal. None if the exit code is not known.
        heartbeat_at: time of the last heartbeat, by CLOCK_MONOTONIC. None if there was no heartbeat, or if the function had
            returned.
        progress: the last `mpwatch.report()` of the rank.
        reported_at: time of that report, by CLOCK_MONOTONIC.
        was_stopped: whether the watcher sent the signal that ended the process.
    """

    pid: int | None
    exit_code: int | None
    heartbeat_at: float | None = None
    progress: Progress | None = None
    reported_at: float | None = None
    was_stopped: bool = False
    log_level = DEBUG

    def __str__(self) -> str:
        how = "was stopped" if self.was_stopped else ""
        how = "has exited with unknown status" if self.exit_code is None else how or format_exit(self.exit_code)
        return f"{self._who}: process {self.pid} {how}"


@dataclass(frozen=True, kw_only=True)
class Restarting(Event):
    """These ranks have failed or were stopped, and all of them have exited. These ranks are restarted after `delay` seconds.

    Attributes:
        cause: the first failure of these ranks.
        delay: seconds until the restart.
        restarts_left: how many more restarts the policy allows.
        reason: why the ranks are restarted, if no rank has failed. This happens on several nodes, for example when a node
            joins.
        is_counted: whether this restart counts as one of the restarts that the policy allows. It is False if the reason is
            that nodes have joined or left, and enough nodes remain.
    """

    cause: ProcessFailure | None
    delay: float
    restarts_left: int
    reason: str = ""
    is_counted: bool = True
    log_level = WARNING  # the ranks lose what they have in memory

    def __str__(self) -> str:
        when = f" in {self.delay:.1f} s" if self.delay else ""
        why = f": {end}" if (end := format_end(self.cause, self.reason)) else ""
        count = f"restart {self.attempt + 1}, {self.restarts_left} left" if self.is_counted else "costs no restart"
        return f"restarting {self._who}{when} ({count}){why}"


@dataclass(frozen=True, kw_only=True)
class Stopping(Event):
    """A stop of the run was requested, and these ranks now know at which step they will stop. See `mpwatch.should_stop`.

    Attributes:
        stop_cause: what requested the stop, such as "SIGUSR1", "request_stop() in rank 3" or "StopPolicy(after=3600)".
        after_step: the number of a step. The ranks stop before the first step after this step. The steps of all epochs are
            counted together. None if no rank had called `should_stop`. Then the first call of `should_stop` returns True.
    """

    stop_cause: str
    after_step: int | None
    log_level = INFO  # the watcher logs a warning of its own

    def __str__(self) -> str:
        when = "at its next step" if self.after_step is None else f"after step {self.after_step}"
        return f"{self._who}: a stop was requested ({self.stop_cause}), {when}"


@dataclass(frozen=True, kw_only=True)
class StateChanged(Event):
    """The state of the run or the WorkerGroup has changed.

    The page "States of a run" of the documentation lists the possible changes.

    Attributes:
        before: the state of the run or the WorkerGroup before the change.
        after: the state after the change.
    """

    before: WorkerState
    after: WorkerState
    log_level = INFO

    def __str__(self) -> str:
        return f"{self.before.name} -> {self.after.name}"


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The run has ended, and all its processes have exited.

    Attributes:
        state: SUCCEEDED, FAILED or STOPPED.
        elapsed: seconds since RunStarted.
        restarts: number of restarts.
        reason: what went wrong, in one line. It is empty after a success.
    """

    state: WorkerState
    elapsed: float
    restarts: int
    reason: str
    log_level = INFO

    def __str__(self) -> str:
        restarts = f", after {format_count(self.restarts, 'restart')}" if self.restarts else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.state.name} after {self.elapsed:.1f} s{restarts}{reason}"
