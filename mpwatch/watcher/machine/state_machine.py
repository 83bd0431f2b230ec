"""What the watcher does when something happens: a pure machine, fed with events and the time, returning actions.

It knows generations: ranks that have failed may be started once more when all of them are gone, and what is told of an
earlier life changes nothing. Whether they are started is not decided here, but by who knows the failure (restarts.py).

It has no clock, pid, pipe or signal of its own. The loop (loop.py) turns what the system says into events and the
machine's actions into system calls, and calls `handle` no later than at `deadline`.

Where a rank is, is in the table of states.py. Where the run is:

    IDLE ------ a call --> WORKING
    WORKING --- every rank has returned -------------------------------> ENDING ---- all are gone ---> OVER
       |  |`--- a rank fails for itself, timeout ---> LOOKING ---> STOPPING -------- all are gone ---> OVER, or
       |   `--- interrupt -----------------------------^--------------^        if it may be tried again, JUDGING
       `------- a rank complains of a peer, or does not say what it raised -> LAST_CALL  until the cause is seen,
                                                                                         or LAST_CALL_SECONDS later
    JUDGING --- restart --------------------------> WORKING
           `--- no restart, or an interrupt ------> OVER

In a job of several nodes all begins in JUDGING, without ranks, and what follows on a verdict is for all of them to decide.
CALLED_OFF is what other nodes want; it also comes if nothing was heard of them for too long (Lease).

Ranks that stay (`keep`) become IDLE again where others are ENDING, and whoever has raised something is waited with, as in
LAST_CALL: if by then every rank has answered, nobody is stopped, and all are IDLE again. The same holds if the watcher is
interrupted by SIGINT: the ranks get it, and if all answer within `grace_period`, they stay. If one is lost, at work or idle,
all are stopped.

LOOKING is for the stacks of those who are still at work, and lasts until they have come, at most LOOK_SECONDS.

While ranks are at work their pulses are felt, see beats.py; the answer to FeelPulse is the next event.

What it guarantees: every stage but IDLE, WORKING and JUDGING has a deadline; IDLE has one for the ranks' start, and WORKING
for that, `timeout` and pulses; JUDGING lasts as long as the caller's own code. The first failure that is no consequence of
another ends the run at once; each rank is looked at once, told to stop once, killed once, and given up once; nothing that a
rank reported is lost.
"""

import math
import signal
from collections.abc import Collection, Iterable

from mpwatch.results.model import WorkerState
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.heartbeats import Heartbeats
from mpwatch.watcher.machine.transitions import (
    LOOK_SECONDS,
    TRANSITIONS,
    Action,
    Event,
    IllegalEventError,
    RankEvent,
    RankPhase,
    RunStage,
    StopReason,
)


class StateMachine:
    """One run of some ranks.

    Args:
        ranks: global ranks of this machine.
        now: seconds on the clock that all later times are of.
        grace_period: seconds between SIGTERM and SIGKILL, and for a rank to end after it has returned.
        start_timeout: seconds for a rank to become ready.
        heartbeat_timeout: seconds that a rank which has beaten once may be silent, or None.
        keep: whether the ranks stay after a call, for the next one.
        judged: the verdicts after which it is asked if ranks are started again.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        now: float,
        grace_period: float,
        start_timeout: float = math.inf,
        heartbeat_timeout: float | None = None,
        keep: bool = False,
        judged: Collection[StopReason] = (),
    ) -> None:
        self.generation = 0
        self._keep, self._judged_after = keep, judged
        self._lease = m.NO_LEASE
        self._is_wanted = True  # by the others: none of them has failed for good
        self._start_timeout, self._grace_period = start_timeout, grace_period
        self._heartbeat_timeout = heartbeat_timeout
        self._begin(ranks, now)
        if not self.phase_table.phases:
            self.stage = RunStage.AWAITING_DECISION

    def _begin(self, ranks: Iterable[int], now: float) -> None:
        self.phase_table = PhaseTable(ranks)
        self.never_ready: list[int] = []
        self.lingering: list[int] = []
        self._dumping: set[int] = set()
        self._start_at = now + self._start_timeout
        self._enter_call(math.inf, now)
        self.stage = RunStage.IDLE

    def _enter_call(self, timeout_at: float, now: float) -> None:
        self.stage = RunStage.RUNNING
        self.signum: int | None = None  # of the first interrupt
        self.verdict: StopReason | None = None
        self.stopped_at: float | None = None
        self._stage_at = math.inf  # when the stage's own time is up
        self._timeout_at = timeout_at
        self.heartbeats = Heartbeats(self._heartbeat_timeout, now)

    @property
    def _leased_until(self) -> float:
        if self.stage in (RunStage.AWAITING_DECISION, RunStage.FINISHED):
            return math.inf  # there are no ranks
        return self._lease.stop_at if self.is_undecided() else self._lease.kill_at

    @property
    def state(self) -> WorkerState:
        """Of these ranks together, as long as they are not over; what they end with is not decided here."""
        if self.stage in (RunStage.IDLE, RunStage.RUNNING, RunStage.AWAITING_ROOT_CAUSE):
            if self.phase_table.count[RankPhase.STARTING]:
                return WorkerState.INIT
            return WorkerState.UNHEALTHY if self.heartbeats.late else WorkerState.HEALTHY
        if not self.phase_table.phases:
            return WorkerState.UNKNOWN
        has_succeeded = self.verdict is StopReason.SUCCEEDED and not self._keep
        return WorkerState.HEALTHY if has_succeeded else WorkerState.UNHEALTHY

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called at the latest; None for as long as only the user's code is waited for."""
        soonest = min(self._stage_at, self._timeout_at if self.is_undecided() else math.inf)
        if self.phase_table.count[RankPhase.STARTING] and (self.is_undecided() or self.stage is RunStage.IDLE):
            soonest = min(soonest, self._start_at)
        if self.stage is RunStage.RUNNING:
            soonest = min(soonest, self.heartbeats.due_at)
        soonest = min(soonest, self._leased_until)
        return soonest if soonest < math.inf else None

    def is_undecided(self) -> bool:
        """Whether a call is under way, and may still go well."""
        return self.stage in (RunStage.RUNNING, RunStage.AWAITING_ROOT_CAUSE) and self.verdict is None

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is to be done about an event. Raises IllegalEventError for one that cannot be."""
        if isinstance(event, m.Interrupted | m.Shutdown | m.Abort) and self.stage is RunStage.AWAITING_DECISION:
            return self._leave_it(event)
        if isinstance(event, m.Interrupted):
            return self._interrupt(event.signum, now)
        if isinstance(event, m.StartCall):
            return self._call(event, now)
        if isinstance(event, m.CancelAttempt):
            return self._dump_stacks_then_stop(now, StopReason.CANCELLED_BY_JOB) if self.is_undecided() else []
        if isinstance(event, m.Lease):
            self._lease = event
            return []
        if isinstance(event, m.Shutdown):
            return self._end_all(now)
        if isinstance(event, m.Abort):  # those who have returned may end
            self._is_wanted = False
            return self._dump_stacks_then_stop(now, StopReason.INTERRUPTED) if self.is_undecided() else []
        if event.generation < self.generation:
            return []
        if isinstance(event, m.Restart | m.DoNotRestart):
            return self._judged(event, now)
        before = self.phase_table.follow(event)
        if before is RankPhase.RUNNING and not isinstance(event, m.HeartbeatRead):
            self.heartbeats.forget(event.rank)
        return self._follow(event, before, now)

    def expire(self, now: float) -> list[Action]:
        """What is to be done now that a deadline has come; nothing if none has."""
        if self.deadline is None or now < self.deadline:
            return []
        if now >= self._leased_until:
            if self.is_undecided():
                return self._dump_stacks_then_stop(now, StopReason.CANCELLED_BY_JOB)
            self._lease = m.NO_LEASE
            return self._stop(now, self.verdict) + self._kill(now)
        if self.stage is RunStage.TERMINATING:
            return self._give_up() if self.phase_table.count[RankPhase.KILLED] else self._kill(now)
        if self.stage is RunStage.SHUTTING_DOWN:
            self.lingering = self.phase_table.those(RankPhase.EXITING)
        if self.stage in (RunStage.SHUTTING_DOWN, RunStage.DUMPING_STACKS):
            return self._stop(now, self.verdict)
        if self.verdict is not None:  # the time that they had is up
            return self._stop(now, self.verdict) + self._kill(now)
        if now >= self._timeout_at:
            return self._dump_stacks_then_stop(now, StopReason.TIMED_OUT)
        if now >= self._start_at and self.phase_table.count[RankPhase.STARTING]:
            self.never_ready = self.phase_table.those(RankPhase.STARTING)
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        if self.stage is RunStage.AWAITING_ROOT_CAUSE:
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        return [m.ReadHeartbeat(rank) for rank in self.heartbeats.feel(self.phase_table.those(RankPhase.RUNNING), now)]

    def _call(self, event: m.StartCall, now: float) -> list[Action]:
        timeout_at = math.inf if event.timeout is None else event.started_at + event.timeout
        if self.stage is RunStage.AWAITING_DECISION and not self.phase_table.phases:  # who the ranks are is not known yet
            self._timeout_at = timeout_at
            return []
        if self.stage is not RunStage.IDLE:
            raise m.IllegalEventError(f"{event} in stage {self.stage.name}")
        self._enter_call(timeout_at, now)
        return [self._call_rank(rank) for rank in self.phase_table.those(RankPhase.READY)]

    def _call_rank(self, rank: int) -> m.CallRank:
        self.phase_table.move(rank, RankPhase.RUNNING)
        return m.CallRank(rank)

    def _end_all(self, now: float) -> list[Action]:
        """Politely if nobody is at work, or still starting."""
        self._keep = False
        if self.stage is RunStage.IDLE and not self.phase_table.count[RankPhase.STARTING]:
            return self._end(now, StopReason.SUCCEEDED)
        is_under_way = self.stage in (RunStage.IDLE, RunStage.RUNNING, RunStage.AWAITING_ROOT_CAUSE, RunStage.DUMPING_STACKS)
        return self._stop(now, self.verdict or StopReason.INTERRUPTED) if is_under_way else []

    def _judged(self, event: m.Restart | m.DoNotRestart, now: float) -> list[Action]:
        if self.stage is RunStage.FINISHED:  # an interrupt came meanwhile
            return []
        if self.stage is not RunStage.AWAITING_DECISION:
            raise m.IllegalEventError(f"{event} in stage {self.stage.name}")
        if isinstance(event, m.DoNotRestart) or not self._is_wanted:
            self._be_over()
            return []
        return self._start_again(now, event.ranks or list(self.phase_table.phases))

    def _start_again(self, now: float, ranks: Iterable[int]) -> list[Action]:
        """The next generation, for the same call, which has as much time left as the last one has left it."""
        self.generation += 1
        timeout_at = self._timeout_at
        self._begin(ranks, now)
        self._enter_call(timeout_at, now)
        return [m.StartRank(rank) for rank in self.phase_table.phases]

    def _leave_it(self, event: m.Interrupted | m.Shutdown | m.Abort) -> list[Action]:
        """They are not started again."""
        self.signum = event.signum if isinstance(event, m.Interrupted) else None
        self._be_over()
        return []

    def _be_over(self) -> None:
        self.stage = RunStage.FINISHED
        self._stage_at = math.inf

    def _follow(self, event: RankEvent, before: RankPhase, now: float) -> list[Action]:
        if isinstance(event, m.Exited):
            return self._on_exit(event.rank, before, now)
        if isinstance(event, m.HeartbeatRead):
            return self._listen(event, now)
        if self.stage is RunStage.DUMPING_STACKS:
            return self._on_stack_dumped(event.rank, now)
        if isinstance(event, m.StackDumped) or (isinstance(event, m.DetailsReceived) and not self._keep):
            return []  # too late; or what nobody has waited for
        if isinstance(event, m.Failing):
            self._wait_for_cause(now)
            return []
        if self.stage is RunStage.TERMINATING:
            # It missed the signal, or was allowed to go on for a while, and is now ready to be told.
            return (
                [m.RequestExit(event.rank)]
                if before is RankPhase.TERMINATING and not isinstance(event, m.DetailsReceived)
                else []
            )
        if isinstance(event, m.Ready):
            return [self._call_rank(event.rank)] if self.is_undecided() else []
        if isinstance(event, m.Failed):
            return self._fail(event.is_secondary, now)
        return self._settle(now)

    def _on_exit(self, rank: int, before: RankPhase, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.stage is RunStage.IDLE:
            actions = self._stop(now, StopReason.FAILED)
        elif self.stage in (RunStage.RUNNING, RunStage.AWAITING_ROOT_CAUSE):
            lost = before in (RankPhase.STARTING, RankPhase.RUNNING)
            actions = self._lose(now) if lost else self._settle(now)
        elif self.stage is RunStage.DUMPING_STACKS:
            actions = self._on_stack_dumped(rank, now)
        if self.phase_table.are_gone():
            self._be_over()
            if self.verdict in self._judged_after and self.signum is None:
                self.stage = RunStage.AWAITING_DECISION
        return actions

    def _lose(self, now: float) -> list[Action]:
        """A rank has died that had not answered."""
        return self._dump_stacks_then_stop(now, StopReason.FAILED) if self.verdict is None else self._stop(now, self.verdict)

    def _fail(self, is_secondary: bool, now: float) -> list[Action]:
        if not is_secondary and not self._keep:
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        self._wait_for_cause(now)
        return self._settle(now)

    def _wait_for_cause(self, now: float) -> None:
        if self.stage is RunStage.RUNNING:
            self.stage = RunStage.AWAITING_ROOT_CAUSE
            self._stage_at = now + m.LAST_CALL_SECONDS

    def _settle(self, now: float) -> list[Action]:
        """If nobody is at work any more, the call ends, well or badly."""
        count = self.phase_table.count
        if count[RankPhase.STARTING] or count[RankPhase.RUNNING] or (self._keep and count[RankPhase.FAILED]):
            return []
        if self._keep:
            return self._rest(now)
        return (
            self._dump_stacks_then_stop(now, StopReason.FAILED)
            if self.stage is RunStage.AWAITING_ROOT_CAUSE
            else self._end(now, StopReason.SUCCEEDED)
        )

    def _rest(self, now: float) -> list[Action]:
        """All have answered, and stay for the next call; but not if one of them has died since."""
        if self.verdict is None:
            self.verdict = StopReason.FAILED if self.stage is RunStage.AWAITING_ROOT_CAUSE else StopReason.SUCCEEDED
        self.phase_table.move_all(RankPhase.RETURNED, to=RankPhase.READY)
        self.phase_table.move_all(RankPhase.DETAILS_SENT, to=RankPhase.READY)
        if self.phase_table.count[RankPhase.EXITED]:
            return self._end(now, self.verdict)
        self.stage = RunStage.IDLE
        self._stage_at = math.inf
        return []

    def _end(self, now: float, verdict: StopReason) -> list[Action]:
        """Tell all who have answered to end, and see that they do."""
        self.stage = RunStage.SHUTTING_DOWN
        self.verdict = verdict
        self._stage_at = now + max(self._grace_period, m.END_SECONDS)
        ranks = self.phase_table.move_all(RankPhase.RETURNED, to=RankPhase.EXITING) + self.phase_table.move_all(
            RankPhase.READY, to=RankPhase.EXITING
        )
        return [m.RequestExit(rank) for rank in ranks]

    def _listen(self, event: m.HeartbeatRead, now: float) -> list[Action]:
        if self.stage is RunStage.RUNNING and self.heartbeats.hear(event.rank, event.beat_at, now):
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        return []

    def _dump_stacks_then_stop(self, now: float, verdict: StopReason) -> list[Action]:
        """Before anybody is told to stop: what are those doing who are at work?"""
        self.verdict = verdict
        self.stopped_at = now  # what ranks do from now on may be because of the look: it interrupts what they wait for
        self._dumping = set(self.phase_table.those(RankPhase.RUNNING))
        if not self._dumping:
            return self._stop(now, verdict)
        self.stage = RunStage.DUMPING_STACKS
        self._stage_at = now + LOOK_SECONDS
        return [m.DumpStacks(rank) for rank in sorted(self._dumping)]

    def _on_stack_dumped(self, rank: int, now: float) -> list[Action]:
        """Something has been heard of this rank: there is nothing more to see."""
        self._dumping.discard(rank)
        return [] if self._dumping else self._stop(now, self.verdict)

    def _stop(self, now: float, verdict: StopReason | None, soft: int = signal.SIGTERM) -> list[Action]:
        """The ladder's first rung. SIGCONT after it, since a stopped process gets nothing but SIGKILL until then."""
        self.stage = RunStage.TERMINATING
        self.verdict = verdict
        self.stopped_at = now if self.stopped_at is None else self.stopped_at
        self._stage_at = now + max(self._grace_period, m.LEAST_GRACE_SECONDS)
        actions: list[Action] = []
        for rank, phase in self.phase_table.phases.items():
            if phase in m.LIVING:
                if phase in (RankPhase.RETURNED, RankPhase.FAILED, RankPhase.DETAILS_SENT):
                    actions.append(m.RequestExit(rank))
                number = soft if phase is RankPhase.RUNNING else signal.SIGTERM  # only a function knows what SIGINT means
                actions += [m.SendSignal(rank, number), m.SendSignal(rank, signal.SIGCONT)]
                self.phase_table.move(rank, RankPhase.TERMINATING)
        return actions

    def _kill(self, now: float) -> list[Action]:
        self._stage_at = now + m.KILL_SECONDS
        return [
            m.SendSignal(rank, signal.SIGKILL)
            for rank in self.phase_table.move_all(RankPhase.TERMINATING, to=RankPhase.KILLED)
        ]

    def _give_up(self) -> list[Action]:
        self._be_over()
        return [m.AbandonRank(rank) for rank in self.phase_table.move_all(RankPhase.KILLED, to=RankPhase.ABANDONED)]

    def _interrupt(self, signum: int, now: float) -> list[Action]:
        """Once: the ranks may save what they have. Twice: at once. When all is over, it is for who noted it to deliver."""
        if self.stage is RunStage.FINISHED or (self.stage is RunStage.IDLE and signum == signal.SIGINT):
            return []
        is_first, self.signum = self.signum is None, self.signum or signum
        verdict = self.verdict or StopReason.INTERRUPTED  # all had returned, or one had failed: that stays so
        may_stay = self._keep and self.is_undecided() and not self.phase_table.count[RankPhase.STARTING]
        if is_first and signum == signal.SIGINT and may_stay:
            return self._interrupt_calls(now)
        if self.stage is RunStage.TERMINATING:
            return self._kill(now) if self.phase_table.count[RankPhase.TERMINATING] else []
        soft = signal.SIGINT if signum == signal.SIGINT and is_first else signal.SIGTERM
        return self._stop(now, verdict, soft=soft) + ([] if is_first else self._kill(now))

    def _interrupt_calls(self, now: float) -> list[Action]:
        """The functions at work are interrupted, and have as long as ever to answer; the ranks need not end of it."""
        self.stage = RunStage.AWAITING_ROOT_CAUSE
        self.verdict = StopReason.INTERRUPTED
        self.stopped_at = now
        self._stage_at = now + max(self._grace_period, m.LEAST_GRACE_SECONDS)
        ranks = self.phase_table.those(RankPhase.RUNNING)
        return [m.SendSignal(rank, number) for rank in ranks for number in (signal.SIGINT, signal.SIGCONT)]


class PhaseTable:
    """The phase of each rank, and the number of ranks in each phase."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.phases = dict.fromkeys(ranks, RankPhase.STARTING)
        self.count = dict.fromkeys(RankPhase, 0) | {RankPhase.STARTING: len(self.phases)}

    def follow(self, event: RankEvent) -> RankPhase:
        """Move the rank to the phase that the table gives for this event. Return the phase before.

        Raises IllegalEventError if the table has none.
        """
        before = self.phases[event.rank]
        try:
            after = TRANSITIONS[before][type(event)]
        except KeyError:
            raise IllegalEventError(f"{event} in phase {before.name}") from None
        if after is not None:
            self.move(event.rank, after)
        return before

    def those(self, phase: RankPhase) -> list[int]:
        """Return the ranks that are in this phase."""
        return [rank for rank, now_in in self.phases.items() if now_in is phase]

    def move_all(self, phase: RankPhase, *, to: RankPhase) -> list[int]:
        """Move all ranks of this phase to another, and return them."""
        ranks = self.those(phase)
        for rank in ranks:
            self.move(rank, to)
        return ranks

    def move(self, rank: int, to: RankPhase) -> None:
        """Move a rank to another phase."""
        self.count[self.phases[rank]] -= 1
        self.count[to] += 1
        self.phases[rank] = to

    def are_gone(self) -> bool:
        """Return whether all ranks have exited."""
        return self.count[RankPhase.EXITED] == len(self.phases)
