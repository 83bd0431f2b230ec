"""Streams of events as a watcher would publish them, written by hand."""

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


class EventHistory:
    """The events of one run. Each method adds events and takes the seconds from the start of the run to the event."""

    def __init__(self, run_id="a1b2c3d4e5", nprocs=2, fn="train", max_restarts=1, role="default", *, is_multi_node=False):
        self.events = []
        self.run_id = run_id
        self.ranks = tuple(range(nprocs))
        self.state = WorkerState.UNKNOWN
        self.nprocs = nprocs
        ranks = () if is_multi_node else self.ranks
        self.add(RunStarted, 0.0, ranks, fn=fn, role=role, nprocs=nprocs, max_restarts=max_restarts, hostname="here")

    def add(self, kind, after, ranks=None, /, **more):
        at = START + after
        ranks = self.ranks if ranks is None else ranks
        self.events.append(kind(time=EPOCH + at, monotonic=at, run_id=self.run_id, ranks=ranks, **more))
        return self

    def change_state(self, state, after):
        before, self.state = self.state, state
        return self.add(StateChanged, after, before=before, after=state)

    def add_for_each_rank(self, kind, after, ranks=None, **more):
        for rank in self.ranks if ranks is None else ranks:
            self.add(kind, after, (rank,), **more)
        return self

    def start_ranks(self, after, attempt=0, ranks=None):
        for rank in self.ranks if ranks is None else ranks:
            self.add(WorkerStarted, after, (rank,), pid=100 + 10 * attempt + rank, attempt=attempt)
        return self

    def start_and_call(self):
        """Start all ranks and call them. They are ready after half a second."""
        self.change_state(WorkerState.INIT, 0.0).start_ranks(0.1).add(CallStarted, 0.2).add_for_each_rank(WorkerReady, 0.5)
        return self.change_state(WorkerState.HEALTHY, 0.5)

    def fail_rank_1(self, attempt=0, after=1.5, **more):
        """Rank 1 fails, and rank 0 is stopped half a second later. The failure is published when both have ended."""
        last = Progress(step=3, total=9, metrics={"loss": float("nan")}, elapsed=after - 0.3)
        self.change_state(WorkerState.UNHEALTHY, after)
        beats = {"heartbeat_at": START + 1.4, "progress": last, "reported_at": START + after - 0.3}
        self.add(WorkerExited, after + 0.1, (1,), attempt=attempt, pid=101, exit_code=1, **beats)
        self.add(WorkerExited, after + 0.5, (0,), attempt=attempt, pid=100, exit_code=-15, was_stopped=True)
        self.add(WorkerFailed, after, (1,), attempt=attempt, failure=failure(1, **more), is_root_cause=True)
        return self.add(WorkerStopped, after + 0.5, (0,), attempt=attempt)

    def restart(self, after=2.0, delay=1.0, attempt=0):
        cause = next(event.failure for event in reversed(self.events) if isinstance(event, WorkerFailed))
        self.add(Restarting, after, attempt=attempt, cause=cause, delay=delay, restarts_left=0)
        at = after + delay
        self.start_ranks(at, attempt + 1).change_state(WorkerState.INIT, at)
        return self.add_for_each_rank(WorkerReady, at + 0.5, attempt=attempt + 1).change_state(WorkerState.HEALTHY, at + 0.5)

    def succeed(self, after, attempt=0):
        self.add_for_each_rank(WorkerSucceeded, after, attempt=attempt)
        for rank in self.ranks:
            self.add(WorkerExited, after + 0.1, (rank,), attempt=attempt, pid=100 + 10 * attempt + rank, exit_code=0)
        return self.change_state(WorkerState.SUCCEEDED, after + 0.1)

    def end(self, after, reason=""):
        restarts = sum(isinstance(event, Restarting) and event.is_counted for event in self.events)
        self.add(RunEnded, after, state=self.state, elapsed=after, restarts=restarts, reason=reason)
        return self.events

    def complete_rendezvous(self, after, group_rank, nodes, attempt=0):
        """Complete a rendezvous: all nodes have the same number of ranks, and this node gets those of its group rank."""
        first, size = self.nprocs * group_rank, self.nprocs * nodes
        self.ranks = tuple(range(first, first + self.nprocs))
        group = {"group_rank": group_rank, "group_world_size": nodes, "world_size": size}
        role = {"role_rank": first, "role_world_size": size}
        store = {"master_addr": "10.0.0.1", "master_port": 4711 + attempt}
        return self.add(RendezvousCompleted, after, attempt=attempt, job="job", **group, **role, **store)

    def add_heartbeat_late(self, after, rank):
        return self.add(HeartbeatLate, after, (rank,), silent_seconds=5.0, heartbeat_timeout=10.0)


def restarted_run():
    """Rank 1 fails once. After the restart both ranks succeed."""
    history = EventHistory().start_and_call().add_heartbeat_late(1.2, 0).fail_rank_1().restart()
    return history.succeed(4.5, attempt=1).end(4.7)


def failed_run():
    """Rank 1 fails twice."""
    history = EventHistory().start_and_call().fail_rank_1().restart().fail_rank_1(1, after=4.0)
    return history.change_state(WorkerState.FAILED, 4.6).end(4.7, reason="rank 1 failed first: ValueError: boom")


def moved_node_run():
    """The third of three nodes becomes the second of two when the first node has failed. Then a third node joins again."""

    def begin(attempt, after, *position):
        history.complete_rendezvous(after, *position, attempt).start_ranks(after, attempt)
        history.change_state(WorkerState.INIT, after).add(CallStarted, after, attempt=attempt)
        history.add_for_each_rank(WorkerReady, after + 0.5, attempt=attempt).change_state(WorkerState.HEALTHY, after + 0.5)

    def end(attempt, after, **more):
        history.change_state(WorkerState.UNHEALTHY, after).add_for_each_rank(WorkerStopped, after + 0.4, attempt=attempt)
        history.add(Restarting, after + 0.5, attempt=attempt, delay=0.0, restarts_left=1, **more)

    history = EventHistory(is_multi_node=True, max_restarts=2)
    begin(0, 0.0, 2, 3)
    end(0, 1.0, cause=failure(0))
    begin(1, 2.0, 1, 2)
    end(1, 3.0, cause=None, reason="other nodes have come: 1", is_counted=False)
    begin(2, 4.0, 1, 3)
    return history.succeed(5.0, attempt=2).end(5.2)
