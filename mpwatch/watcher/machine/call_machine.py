"""The decisions about one call: which ranks are called, stopped and killed, and when. Pure.

    event loop --- event, time ---> CallMachine.handle            ---> actions for the event loop
               --- time ----------> CallMachine.handle_deadline   ---> actions for the event loop

The machine knows no clock, pid, pipe or signal handler. transitions.py has its tables and drawings. Guarantees:

- The stages DUMPING_STACKS, SHUTTING_DOWN and TERMINATING have a deadline. So has AWAITING_ROOT_CAUSE, unless a prompt of a
  debugger is open.
- A call of `run` ends at once after a failure that no other rank can have caused. After a secondary failure the machine
  waits at most ROOT_CAUSE_WAIT_SECONDS for the root cause; if it has a lease, the cause may come from another node. In a
  WorkerGroup it always waits, for the answers of the other ranks: if all ranks answer in time, they stay alive.
- Each rank gets at most one DumpStacks, one SIGTERM, one SIGKILL and one AbandonRank.
- A failure that a rank reports before the ranks are stopped is in the result.
"""

import math
import signal
from collections.abc import Mapping

from mpwatch.results.model import WorkerState
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.heartbeats import Heartbeats
from mpwatch.watcher.machine.transitions import (
    STACK_DUMP_SECONDS,
    STAGES,
    TRANSITIONS,
    Action,
    CallStage,
    Event,
    IllegalEventError,
    RankEvent,
    RankPhase,
    StopReason,
)


class CallMachine:
    """Decides about the ranks of one call, from its begin until its ranks are idle again or have ended.

    All times are of one clock, in seconds. `grace_period` is also the time that a rank has to exit after it has returned.
    `stop_timeout` counts from the request to stop, and `lease` is how long the ranks may run without contact to the other
    nodes. With `are_limits_suspended`, a prompt of a debugger is open.
    """

    def __init__(
        self,
        phases: Mapping[int, RankPhase],
        *,
        now: float,
        grace_period: float,
        timeout_at: float = math.inf,
        start_deadline: float = math.inf,
        heartbeat_timeout: float | None = None,
        stop_timeout: float | None = None,
        keep_ranks: bool = False,
        lease: m.Lease = m.NO_LEASE,
        are_limits_suspended: bool = False,
    ) -> None:
        self.stage = CallStage.RUNNING
        self.phase_table = PhaseTable(phases)
        self.heartbeats = Heartbeats(heartbeat_timeout, now)
        self.stop_reason: StopReason | None = None
        self.stopped_at: float | None = None
        self.stop_request: m.StopRequested | None = None
        self.is_stop_overdue = False  # the ranks have not returned within `stop_timeout`
        self.never_ready: list[int] = []
        self.overdue_exits: list[int] = []  # ranks that had returned, and were stopped since they did not exit
        self.signum: int | None = None  # of the first interrupt
        self.interrupt_cause = m.InterruptCause.SIGNAL
        self._dumping: set[int] = set()  # ranks whose stacks have not come yet
        self.keeps_ranks, self._grace_period, self._lease = keep_ranks, grace_period, lease
        self._stop_timeout = math.inf if stop_timeout is None else stop_timeout
        self._timeout_at, self._start_deadline = timeout_at, start_deadline
        self.is_overdue = False  # the timeout has ended the call
        self._stage_deadline = self._stop_deadline = math.inf
        self._limits_suspended_at = now if are_limits_suspended else None

    def begin(self) -> list[Action]:
        """Call the ranks that are ready. The others are called when they are."""
        return [self._call_rank(rank) for rank in self.phase_table.ranks_in(RankPhase.READY)]

    def end_idle_ranks(self, now: float, *, has_lost_one: bool = False) -> list[Action]:
        """Instead of a call: let idle ranks exit, or stop them if they may still wait for a rank that was lost."""
        if has_lost_one:
            return self._terminate(now, StopReason.FAILED)
        if self.phase_table.counts[RankPhase.STARTING]:
            return self._terminate(now, StopReason.INTERRUPTED)
        self.keeps_ranks = False
        return self._shut_down(now, StopReason.SUCCEEDED)

    @property
    def state(self) -> WorkerState:
        """One state for all ranks of the call. The final state of each rank comes from the diagnosis only."""
        if self.stage in (CallStage.RUNNING, CallStage.AWAITING_ROOT_CAUSE):
            if self.phase_table.counts[RankPhase.STARTING]:
                return WorkerState.INIT
            return WorkerState.UNHEALTHY if self.heartbeats.late_ranks else WorkerState.HEALTHY
        has_succeeded = self.stage is CallStage.KEPT or (self.stop_reason is StopReason.SUCCEEDED and not self.keeps_ranks)
        return WorkerState.HEALTHY if has_succeeded else WorkerState.UNHEALTHY

    @property
    def deadline(self) -> float:
        """When `handle_deadline` must be called."""
        if self._limits_suspended_at is not None and self.is_running():
            soonest = math.inf
        elif self.is_running():
            soonest = min(self._stage_deadline, self._stop_deadline, self._timeout_at)
            if self.phase_table.counts[RankPhase.STARTING]:
                soonest = min(soonest, self._start_deadline)
            if self.stage is CallStage.RUNNING:
                soonest = min(soonest, self.heartbeats.due_at)
        else:
            soonest = self._stage_deadline
        return min(soonest, self._lease_deadline)

    @property
    def _lease_deadline(self) -> float:
        if self.is_over():
            return math.inf
        return self._lease.stop_at if self.is_running() else self._lease.kill_at

    def is_over(self) -> bool:
        return self.stage in (CallStage.KEPT, CallStage.FINISHED)

    def is_running(self) -> bool:
        return self.stage in (CallStage.RUNNING, CallStage.AWAITING_ROOT_CAUSE) and self.stop_reason is None

    def are_limits_active(self) -> bool:
        return self.is_running() and self._limits_suspended_at is None

    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, RankEvent):
            before = self.phase_table.apply(event)
            if before is RankPhase.RUNNING:
                self.heartbeats.late_ranks.pop(event.rank, None)
            return self._on_rank_event(event, before, now)
        if self.is_over():
            return []
        if isinstance(event, m.HeartbeatsRead):
            return self._on_heartbeats(event, now)
        if isinstance(event, m.StopRequested):
            self._on_stop_request(event, now)
        elif isinstance(event, m.Interrupted):
            return self._on_interrupt(event, now)
        elif isinstance(event, m.EndCall):
            may_end = self.are_limits_active() if event.reason is StopReason.FAILED else self.is_running()
            return self._dump_stacks_then_stop(now, event.reason) if may_end else []
        elif isinstance(event, m.Shutdown):
            return self._on_shutdown(now)
        elif isinstance(event, m.Lease):
            self._lease = event
        elif isinstance(event, m.Resumed):
            self._on_resumed(event, now)
        else:
            self._on_limits(event, now)
        return []

    def handle_deadline(self, now: float) -> list[Action]:
        """Return the actions that are due at the deadline, or an empty list before the deadline."""
        if now < self.deadline:
            return []
        if now >= self._lease_deadline:
            return self._on_lease_deadline(now)
        if self.stage is CallStage.TERMINATING:
            return self._abandon() if self.phase_table.counts[RankPhase.KILLED] else self._kill(now)
        if self.stage is CallStage.SHUTTING_DOWN:
            self.overdue_exits = self.phase_table.ranks_in(RankPhase.EXITING)
            return self._terminate(now, self.stop_reason)
        if self.stage is CallStage.DUMPING_STACKS:
            return self._stop(now)
        if self.stop_reason is not None:  # ranks of a WorkerGroup that did not react to SIGINT within the grace period
            return self._terminate(now, self.stop_reason) + self._kill(now)
        if now >= self._timeout_at:
            self.is_overdue = True
            return self._dump_stacks_then_stop(now, StopReason.TIMED_OUT)
        if now >= self._stop_deadline:
            return self._on_stop_timeout(now)
        if now >= self._start_deadline and self.phase_table.counts[RankPhase.STARTING]:
            self.never_ready = self.phase_table.ranks_in(RankPhase.STARTING)
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        if self.stage is CallStage.AWAITING_ROOT_CAUSE:
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        running = self.phase_table.ranks_in(RankPhase.RUNNING)
        return [m.ReadHeartbeats(tuple(running))] if self.heartbeats.begin_reading(now) else []

    def _enter(self, stage: CallStage, deadline: float = math.inf) -> None:
        if stage is not self.stage and stage not in STAGES[self.stage]:
            raise IllegalEventError(f"stage {stage.name} after stage {self.stage.name}")
        self.stage, self._stage_deadline = stage, deadline

    def _on_limits(self, event: m.SuspendLimits, now: float) -> None:
        suspended_at = self._limits_suspended_at
        if event.are_suspended:
            self._limits_suspended_at = now if suspended_at is None else suspended_at
        elif suspended_at is not None:
            self._limits_suspended_at = None
            self._shift_deadlines(now - suspended_at, stage_too=self.is_running())
            self.heartbeats.restart(now)

    def _on_resumed(self, event: m.Resumed, now: float) -> None:
        # Not the lease: the other nodes of the job were running all the time.
        seconds = now - event.suspended_at
        self._shift_deadlines(seconds, stage_too=True)
        if self._limits_suspended_at is not None:
            self._limits_suspended_at = min(now, self._limits_suspended_at + seconds)
        if self.is_running():
            self.heartbeats.restart(now)

    def _shift_deadlines(self, seconds: float, *, stage_too: bool) -> None:
        self._timeout_at += seconds
        self._stop_deadline += seconds
        self._start_deadline += seconds
        self._stage_deadline += seconds if stage_too else 0.0

    def _call_rank(self, rank: int) -> m.CallRank:
        self.phase_table.set_phase(rank, RankPhase.RUNNING)
        return m.CallRank(rank)

    # --- events of a rank

    def _on_rank_event(self, event: RankEvent, before: RankPhase, now: float) -> list[Action]:
        if isinstance(event, m.Exited):
            return self._on_exit(event.rank, before, now)
        if self.stage is CallStage.DUMPING_STACKS:
            if isinstance(event, m.Returned) and self.stop_reason is not StopReason.INTERRUPTED:
                self._dumping.add(event.rank)
                return [m.DumpStacks(event.rank)]
            return self._on_stack_dumped(event.rank, now)
        if isinstance(event, m.StackDumped) or (isinstance(event, m.DetailsReceived) and not self.keeps_ranks):
            return []  # stacks that came too late, or details that nothing waits for
        if isinstance(event, m.Failing):
            self._await_root_cause(now)
            return []
        if self.stage is CallStage.TERMINATING:
            # The rank missed or handled SIGTERM. Its function has ended now, so the rank can exit.
            can_exit = before is RankPhase.TERMINATING and not isinstance(event, m.DetailsReceived)
            return [m.RequestExit(event.rank)] if can_exit else []
        if isinstance(event, m.Ready):
            return [self._call_rank(event.rank)] if self.is_running() else []
        if isinstance(event, m.Failed):
            return self._on_failure(event.is_secondary, now)
        return self._end_if_complete(now)

    def _on_exit(self, rank: int, before: RankPhase, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.stage in (CallStage.RUNNING, CallStage.AWAITING_ROOT_CAUSE):
            if before not in (RankPhase.STARTING, RankPhase.RUNNING):  # it has answered
                actions = self._end_if_complete(now)
            elif self.stop_reason is None:
                actions = self._dump_stacks_then_stop(now, StopReason.FAILED)
            else:
                actions = self._terminate(now, self.stop_reason)
        elif self.stage is CallStage.DUMPING_STACKS:
            actions = self._on_stack_dumped(rank, now)
        if self.phase_table.have_all_exited():
            self._enter(CallStage.FINISHED)
        return actions

    def _on_failure(self, is_secondary: bool, now: float) -> list[Action]:
        if not is_secondary and not self.keeps_ranks:
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        self._await_root_cause(now)
        return self._end_if_complete(now)

    def _await_root_cause(self, now: float) -> None:
        if self.stage is CallStage.RUNNING:
            self._enter(CallStage.AWAITING_ROOT_CAUSE, now + m.ROOT_CAUSE_WAIT_SECONDS)

    def _on_heartbeats(self, event: m.HeartbeatsRead, now: float) -> list[Action]:
        is_limited = self.stage is CallStage.RUNNING and self._limits_suspended_at is None
        if is_limited and self.heartbeats.add(event.beats, now):
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        return []

    # --- the end of the call

    def _end_if_complete(self, now: float) -> list[Action]:
        counts = self.phase_table.counts
        still_sends_details = self.keeps_ranks and counts[RankPhase.FAILED]
        if counts[RankPhase.STARTING] or counts[RankPhase.RUNNING] or still_sends_details:
            return []
        if self.keeps_ranks:
            return self._become_idle(now)
        if self.stage is CallStage.AWAITING_ROOT_CAUSE:
            may_come_from_other_node = self._lease is not m.NO_LEASE  # until ROOT_CAUSE_WAIT_SECONDS are over
            return [] if may_come_from_other_node else self._dump_stacks_then_stop(now, StopReason.FAILED)
        return self._shut_down(now, StopReason.SUCCEEDED)

    def _become_idle(self, now: float) -> list[Action]:
        """Keep the ranks for the next call. But if a rank has exited, end the other ranks, too."""
        if self.stop_reason is None:
            has_failed = self.stage is CallStage.AWAITING_ROOT_CAUSE
            self.stop_reason = StopReason.FAILED if has_failed else StopReason.SUCCEEDED
        self.phase_table.move_all(RankPhase.RETURNED, to=RankPhase.READY)
        self.phase_table.move_all(RankPhase.DETAILS_SENT, to=RankPhase.READY)
        if self.phase_table.counts[RankPhase.EXITED]:
            return self._shut_down(now, self.stop_reason)
        self._enter(CallStage.KEPT)
        return []

    def _on_shutdown(self, now: float) -> list[Action]:
        self.keeps_ranks = False
        if self.stage in (CallStage.RUNNING, CallStage.AWAITING_ROOT_CAUSE, CallStage.DUMPING_STACKS):
            return self._terminate(now, self.stop_reason or StopReason.INTERRUPTED)
        return []

    def _shut_down(self, now: float, stop_reason: StopReason) -> list[Action]:
        """Ask all ranks that have returned or are idle to exit, and wait for their exits."""
        self._enter(CallStage.SHUTTING_DOWN, now + max(self._grace_period, m.EXIT_SECONDS))
        self.stop_reason = stop_reason
        returned = self.phase_table.move_all(RankPhase.RETURNED, to=RankPhase.EXITING)
        idle = self.phase_table.move_all(RankPhase.READY, to=RankPhase.EXITING)
        return [m.RequestExit(rank) for rank in returned + idle]

    def _on_interrupt(self, event: m.Interrupted, now: float) -> list[Action]:
        """Stop the ranks at the first interrupt, and kill them at the second, or if they have got SIGTERM already.

        But if they have got SIGTERM because other nodes have ended the attempt, the first interrupt changes nothing: perhaps
        the same signal has reached the other nodes a moment earlier.
        """
        signum, is_first = event.signum, self.signum is None
        if is_first:
            self.signum, self.interrupt_cause = signum, event.cause
        stop_reason = self.stop_reason or StopReason.INTERRUPTED  # a success or a failure before the signal remains one
        if is_first and self.is_running():
            return self._dump_stacks_then_stop(now, stop_reason)
        if self.stage is CallStage.TERMINATING:
            if is_first and self.stop_reason is StopReason.CANCELLED_BY_JOB:
                return []
            return self._kill(now) if self.phase_table.counts[RankPhase.TERMINATING] else []
        signum_for_running = signal.SIGINT if signum == signal.SIGINT and is_first else signal.SIGTERM
        actions = self._terminate(now, stop_reason, signum_for_running=signum_for_running)
        return actions if is_first else actions + self._kill(now)

    def _on_stop_request(self, event: m.StopRequested, now: float) -> None:
        if self.is_running() and self.stop_request is None:
            self.stop_request = event
            self._stop_deadline = now + self._stop_timeout

    def _on_stop_timeout(self, now: float) -> list[Action]:
        assert self.stop_request is not None
        self.is_stop_overdue = True
        if self.stop_request.signum is None:
            return self._dump_stacks_then_stop(now, StopReason.TIMED_OUT)
        self.signum, self.interrupt_cause = self.stop_request.signum, m.InterruptCause.STOP_TIMEOUT
        return self._dump_stacks_then_stop(now, StopReason.INTERRUPTED)

    def _interrupt_functions(self, now: float) -> list[Action]:
        """Send SIGINT to the ranks of a WorkerGroup. Ranks that answer within the grace period stay alive."""
        self._enter(CallStage.AWAITING_ROOT_CAUSE, now + max(self._grace_period, m.MIN_GRACE_SECONDS))
        ranks = self.phase_table.ranks_in(RankPhase.RUNNING)
        signals = [m.SendSignal(rank, number) for rank in ranks for number in (signal.SIGINT, signal.SIGCONT)]
        return signals + self._end_if_complete(now)  # they may have answered while the stacks came

    def _on_lease_deadline(self, now: float) -> list[Action]:
        if self.is_running():
            return self._dump_stacks_then_stop(now, StopReason.CANCELLED_BY_JOB)
        self._lease = m.NO_LEASE
        terminated = [] if self.stage is CallStage.TERMINATING else self._terminate(now, self.stop_reason)
        return terminated + self._kill(now)

    # --- stopping: DumpStacks, SIGTERM, SIGKILL, AbandonRank

    def _dump_stacks_then_stop(self, now: float, stop_reason: StopReason) -> list[Action]:
        """Ask the ranks for their stacks and collectives. Stop all when these have come, or after STACK_DUMP_SECONDS.

        Ranks that have returned are asked, too, unless the call was interrupted: perhaps a rank failed in a collective that
        they have not called.
        """
        self.stop_reason = stop_reason
        # A request for stacks interrupts system calls. What a rank reports from now on may be a consequence of that.
        self.stopped_at = now
        self._dumping = set(self.phase_table.ranks_in(RankPhase.RUNNING))
        if stop_reason is not StopReason.INTERRUPTED:
            self._dumping.update(self.phase_table.ranks_in(RankPhase.RETURNED))
        if not self._dumping:
            return self._stop(now)
        self._enter(CallStage.DUMPING_STACKS, now + STACK_DUMP_SECONDS)
        return list(map(m.DumpStacks, sorted(self._dumping)))

    def _on_stack_dumped(self, rank: int, now: float) -> list[Action]:
        """Stop all ranks if no more stacks can come. A rank that has failed or exited sends none."""
        self._dumping.discard(rank)
        return [] if self._dumping else self._stop(now)

    def _stop(self, now: float) -> list[Action]:
        """Stop the ranks after their stacks have come. If Ctrl-C is the reason for the stop, running ranks get SIGINT."""
        if self.stop_reason is not StopReason.INTERRUPTED or self.signum != signal.SIGINT:
            return self._terminate(now, self.stop_reason)
        counts = self.phase_table.counts
        if self.keeps_ranks and not (counts[RankPhase.STARTING] or counts[RankPhase.EXITED]):
            return self._interrupt_functions(now)
        return self._terminate(now, self.stop_reason, signum_for_running=signal.SIGINT)

    def _terminate(
        self, now: float, stop_reason: StopReason | None, signum_for_running: int = signal.SIGTERM
    ) -> list[Action]:
        """Send `signum_for_running` to running ranks, and SIGTERM to all other ranks that are alive.

        Each rank also gets SIGCONT, because a process that SIGSTOP has stopped handles SIGTERM only after SIGCONT.
        """
        self._enter(CallStage.TERMINATING, now + max(self._grace_period, m.MIN_GRACE_SECONDS))
        self.stop_reason = stop_reason
        self.stopped_at = now if self.stopped_at is None else self.stopped_at
        actions: list[Action] = []
        for rank, phase in self.phase_table.phases.items():
            if phase in m.ALIVE_PHASES:
                signum = signum_for_running if phase is RankPhase.RUNNING else signal.SIGTERM  # SIGINT is for functions only
                actions += [m.SendSignal(rank, signum), m.SendSignal(rank, signal.SIGCONT)]
                if phase in (RankPhase.RETURNED, RankPhase.FAILED, RankPhase.DETAILS_SENT):
                    # For a rank that ignores SIGTERM. Before SIGTERM, the signal could break off an atexit function.
                    actions.append(m.RequestExit(rank))
                self.phase_table.set_phase(rank, RankPhase.TERMINATING)
        return actions

    def _kill(self, now: float) -> list[Action]:
        self._enter(CallStage.TERMINATING, now + m.KILL_SECONDS)
        ranks = self.phase_table.move_all(RankPhase.TERMINATING, to=RankPhase.KILLED)
        return [m.SendSignal(rank, signal.SIGKILL) for rank in ranks]

    def _abandon(self) -> list[Action]:
        self._enter(CallStage.FINISHED)
        return [m.AbandonRank(rank) for rank in self.phase_table.move_all(RankPhase.KILLED, to=RankPhase.ABANDONED)]


class PhaseTable:
    """The phase of each rank, and the number of ranks in each phase: with 1,000 ranks, counting them anew is too slow."""

    def __init__(self, phases: Mapping[int, RankPhase]) -> None:
        self.phases = dict(phases)
        self.counts = dict.fromkeys(RankPhase, 0)
        for phase in self.phases.values():
            self.counts[phase] += 1

    def apply(self, event: RankEvent) -> RankPhase:
        before = self.phases[event.rank]
        try:
            after = TRANSITIONS[before][type(event)]
        except KeyError:
            raise IllegalEventError(f"{event} in phase {before.name}") from None
        if after is not None:
            self.set_phase(event.rank, after)
        return before

    def ranks_in(self, phase: RankPhase) -> list[int]:
        return [rank for rank, current in self.phases.items() if current is phase]

    def move_all(self, phase: RankPhase, *, to: RankPhase) -> list[int]:
        ranks = self.ranks_in(phase)
        for rank in ranks:
            self.set_phase(rank, to)
        return ranks

    def set_phase(self, rank: int, phase: RankPhase) -> None:
        self.counts[self.phases[rank]] -= 1
        self.counts[phase] += 1
        self.phases[rank] = phase

    def have_all_exited(self) -> bool:
        return self.counts[RankPhase.EXITED] == len(self.phases)
