"""Streams of events as a watcher would tell them, made by hand."""

from mpwatch import FailureKind, ProcessFailure, Progress, WorkerState
from mpwatch.events import (
    CallStarted,
    HeartbeatLate,
    RendezvousCompleted,
    Restarting,
    RunEnded,
    RunStarted,
    StateChanged,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
    WorkerStopped,
    WorkerSucceeded,
)

START = 1000.0  # by CLOCK_MONOTONIC
EPOCH = 1_700_000_000.0 - START


def failure(rank, kind=FailureKind.EXCEPTION, **more):
    if kind is FailureKind.EXCEPTION:
        error = ValueError("boom")
        more = {"exception": error, "summary": "ValueError: boom", "traceback": "Traceback ...\nValueError: boom\n", **more}
    return ProcessFailure(
        rank=rank, local_rank=rank, pid=100 + rank, hostname="here", kind=kind, **{"exit_code": 1, "elapsed": 1.5, **more}
    )


class Story:
    """What is told of a run, one event after another; each says how many seconds after the start it happened."""

    def __init__(self, run_id="a1b2c3d4e5", nprocs=2, fn="train", max_restarts=1, role="trainer", *, is_on_nodes=False):
        self.events = []
        self.run_id = run_id
        self.ranks = tuple(range(nprocs))
        self.state = WorkerState.UNKNOWN
        self.nprocs = nprocs
        told = () if is_on_nodes else self.ranks
        self.tell(RunStarted, 0.0, told, fn=fn, role=role, nprocs=nprocs, max_restarts=max_restarts, hostname="here")

    def tell(self, kind, after, ranks=None, /, **more):
        at = START + after
        ranks = self.ranks if ranks is None else ranks
        self.events.append(kind(time=EPOCH + at, monotonic=at, run_id=self.run_id, ranks=ranks, **more))
        return self

    def becomes(self, state, after):
        before, self.state = self.state, state
        return self.tell(StateChanged, after, before=before, after=state)

    def each(self, kind, after, ranks=None, **more):
        for rank in self.ranks if ranks is None else ranks:
            self.tell(kind, after, (rank,), **more)
        return self

    def started(self, after, attempt=0, ranks=None):
        for rank in self.ranks if ranks is None else ranks:
            self.tell(WorkerStarted, after, (rank,), pid=100 + 10 * attempt + rank, attempt=attempt)
        return self

    def begin(self):
        """All are ready and called after half a second."""
        self.becomes(WorkerState.INIT, 0.0).started(0.1).tell(CallStarted, 0.2).each(WorkerReady, 0.5)
        return self.becomes(WorkerState.HEALTHY, 0.5)

    def rank_1_fails(self, attempt=0, after=1.5, **more):
        """And rank 0 is stopped half a second later; who failed is told when both have ended."""
        last = Progress(step=3, total=9, metrics={"loss": float("nan")}, elapsed=after - 0.3)
        self.becomes(WorkerState.UNHEALTHY, after)
        beats = {"heartbeat_at": START + 1.4, "progress": last, "reported_at": START + after - 0.3}
        self.tell(WorkerExited, after + 0.1, (1,), attempt=attempt, pid=101, exit_code=1, **beats)
        self.tell(WorkerExited, after + 0.5, (0,), attempt=attempt, pid=100, exit_code=-15, was_stopped=True)
        self.tell(WorkerFailed, after, (1,), attempt=attempt, failure=failure(1, **more), is_root_cause=True)
        return self.tell(WorkerStopped, after + 0.5, (0,), attempt=attempt)

    def restart(self, after=2.0, delay=1.0, attempt=0):
        cause = next(event.failure for event in reversed(self.events) if isinstance(event, WorkerFailed))
        self.tell(Restarting, after, attempt=attempt, cause=cause, delay=delay, restarts_left=0)
        self.started(after + delay, attempt + 1).becomes(WorkerState.INIT, after + delay)
        return self.each(WorkerReady, after + delay + 0.5, attempt=attempt + 1).becomes(
            WorkerState.HEALTHY, after + delay + 0.5
        )

    def succeed(self, after, attempt=0):
        self.each(WorkerSucceeded, after, attempt=attempt)
        for rank in self.ranks:
            self.tell(WorkerExited, after + 0.1, (rank,), attempt=attempt, pid=100 + 10 * attempt + rank, exit_code=0)
        return self.becomes(WorkerState.SUCCEEDED, after + 0.1)

    def end(self, after, reason=""):
        restarts = sum(isinstance(event, Restarting) for event in self.events)
        self.tell(RunEnded, after, state=self.state, elapsed=after, restarts=restarts, reason=reason)
        return self.events

    def meet(self, after, group_rank, nodes, attempt=0):
        """All nodes have as many ranks; from now on these are ours."""
        first, size = self.nprocs * group_rank, self.nprocs * nodes
        self.ranks = tuple(range(first, first + self.nprocs))
        who = {"group_rank": group_rank, "group_world_size": nodes, "world_size": size}
        role = {"role_rank": first, "role_world_size": size}
        store = {"master_addr": "10.0.0.1", "master_port": 4711 + attempt}
        return self.tell(RendezvousCompleted, after, attempt=attempt, job="job", backend="c10d", **who, **role, **store)

    def heartbeat_late(self, after, rank):
        return self.tell(HeartbeatLate, after, (rank,), silent_seconds=5.0, heartbeat_timeout=10.0)


def restarted():
    """Rank 1 fails once; the second time both succeed."""
    return Story().begin().heartbeat_late(1.2, 0).rank_1_fails().restart().succeed(4.5, attempt=1).end(4.7)


def failed():
    """Rank 1 fails twice."""
    story = Story().begin().rank_1_fails().restart().rank_1_fails(1, after=4.0)
    return story.becomes(WorkerState.FAILED, 4.6).end(4.7, reason="rank 1 failed first: ValueError: boom")


def moved():
    """The third of three nodes is the second of two when the first has failed, and then a third one comes again."""
    story = Story(is_on_nodes=True, max_restarts=2).meet(0.1, 2, 3).becomes(WorkerState.INIT, 0.1).started(0.1)
    story.tell(CallStarted, 0.2).each(WorkerReady, 0.5).becomes(WorkerState.HEALTHY, 0.5)
    story.becomes(WorkerState.UNHEALTHY, 1.0).each(WorkerStopped, 1.4)
    story.tell(Restarting, 1.5, cause=failure(0), delay=0.0, restarts_left=1)
    story.meet(2.0, 1, 2, 1).started(2.0, 1).becomes(WorkerState.INIT, 2.0).each(WorkerReady, 2.5, attempt=1)
    story.becomes(WorkerState.HEALTHY, 2.5).becomes(WorkerState.UNHEALTHY, 3.0).each(WorkerStopped, 3.4, attempt=1)
    story.tell(Restarting, 3.5, cause=None, delay=0.0, restarts_left=1, attempt=1, reason="other nodes have come: 1")
    story.meet(4.0, 1, 3, 2).started(4.0, 2).becomes(WorkerState.INIT, 4.0).each(WorkerReady, 4.5, attempt=2)
    return story.becomes(WorkerState.HEALTHY, 4.5).succeed(5.0, attempt=2).end(5.2)
