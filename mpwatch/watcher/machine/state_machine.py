"""The decisions of the watcher: which ranks it calls, stops and kills, and when. Pure.

    event loop --- event, time ---> StateMachine.handle            ---> actions for the event loop
               --- time ----------> StateMachine.handle_deadline   ---> actions for the event loop

transitions.py has the tables, the drawings and the rules. heartbeats.py finds the ranks that exceed `heartbeat_timeout`.
StateMachine does not decide whether failed ranks are restarted, because run_controller.py makes this decision.

Guarantees:

- The stages DUMPING_STACKS, SHUTTING_DOWN and TERMINATING always have a deadline. The stage AWAITING_ROOT_CAUSE has a
  deadline, but an open prompt of a debugger can suspend this deadline. The stage AWAITING_DECISION has no deadline, because
  the user code that decides about a restart can take any time.
- A failure is secondary if another rank may have caused it. In a run, the attempt ends at once if a rank has a failure that
  is not secondary. After a secondary failure, StateMachine waits at most ROOT_CAUSE_WAIT_SECONDS for the root cause. In a
  WorkerGroup, StateMachine waits after any first failure, at most ROOT_CAUSE_WAIT_SECONDS, for the answers of the other
  ranks. If all ranks of the call answer in time, the ranks stay alive.
- In one call, or in one attempt of a run, each rank gets at most one DumpStacks, one SIGTERM, one SIGKILL and one
  AbandonRank.
- If a rank reports a failure before StateMachine stops the ranks, the result of the call contains this failure.
"""

import math
import signal
from collections.abc import Collection, Iterable

from mpwatch.results.model import WorkerState
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.heartbeats import Heartbeats
from mpwatch.watcher.machine.transitions import (
    STACK_DUMP_SECONDS,
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
    """Decides which ranks of one restart group are started, called, stopped and killed, and when.

    Args:
        ranks: global ranks of the group. There are none if the ranks are unknown before the first Restart.
        now: the current time, in seconds on the clock of all later times.
        grace_period: seconds between SIGTERM and SIGKILL. A rank has the same time to exit after it has returned.
        start_timeout: seconds for a rank to become ready.
        heartbeat_timeout: seconds that a rank may be silent after its first heartbeat, or None for no limit.
        stop_timeout: seconds for the ranks to return after a stop was requested, or None for no limit.
        keep_ranks: whether the ranks stay after a call, for the next call.
        decide_after: the stop reasons after which the machine waits for Restart or DoNotRestart.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        now: float,
        grace_period: float,
        start_timeout: float = math.inf,
        heartbeat_timeout: float | None = None,
        stop_timeout: float | None = None,
        keep_ranks: bool = False,
        decide_after: Collection[StopReason] = (),
    ) -> None:
        self.generation = 0  # which start of the ranks
        self._keep_ranks, self._decide_after = keep_ranks, decide_after
        self._lease = m.NO_LEASE
        self._limits_suspended_at: float | None = None  # while a prompt of a debugger is open
        self._may_restart = True  # False once another restart group has failed
        self._start_timeout, self._grace_period = start_timeout, grace_period
        self._heartbeat_timeout = heartbeat_timeout
        self._stop_timeout = math.inf if stop_timeout is None else stop_timeout
        self._begin_generation(ranks, now)
        if not self.phase_table.phases:
            self.stage = RunStage.AWAITING_DECISION

    def _begin_generation(self, ranks: Iterable[int], now: float) -> None:
        self.phase_table = PhaseTable(ranks)
        self.never_ready: list[int] = []
        self.overdue_exits: list[int] = []  # ranks that had returned, and were stopped since they did not exit
        self._dumping: set[int] = set()  # ranks whose stacks have not come yet
        self._start_deadline = now + self._start_timeout
        self._begin_call(math.inf, now)
        self.stage = RunStage.IDLE

    def _begin_call(self, timeout_at: float, now: float) -> None:
        self.stage = RunStage.RUNNING
        self._first_interrupt: m.Interrupted | None = None
        self.stop_request: m.StopRequested | None = None
        self._stop_deadline = math.inf  # for the ranks to return after the request
        self.is_stop_overdue = False  # whether they have not
        self.stop_reason: StopReason | None = None
        self.stopped_at: float | None = None
        self._stage_deadline = math.inf
        self._timeout_at = timeout_at
        self._limits_suspended_at = None if self._limits_suspended_at is None else now
        self.heartbeats = Heartbeats(self._heartbeat_timeout, now)

    @property
    def state(self) -> WorkerState:
        """A single state that summarises all ranks of this state machine.

        Do not take the final states of the ranks from this property. Only the diagnosis (diagnose.py) determines the final
        state of each rank.
        """
        if self.stage in (RunStage.IDLE, RunStage.RUNNING, RunStage.AWAITING_ROOT_CAUSE):
            if self.phase_table.counts[RankPhase.STARTING]:
                return WorkerState.INIT
            return WorkerState.UNHEALTHY if self.heartbeats.late_ranks else WorkerState.HEALTHY
        if not self.phase_table.phases:
            return WorkerState.UNKNOWN
        has_succeeded = self.stop_reason is StopReason.SUCCEEDED and not self._keep_ranks
        return WorkerState.HEALTHY if has_succeeded else WorkerState.UNHEALTHY

    @property
    def deadline(self) -> float | None:
        """The latest time to call `handle_deadline`, or None if there is no deadline at present."""
        if self._limits_suspended_at is not None and self.is_call_running():
            return self._lease_deadline if self._lease_deadline < math.inf else None
        call_deadline = min(self._timeout_at, self._stop_deadline)
        soonest = min(self._stage_deadline, call_deadline if self.is_call_running() else math.inf)
        if self.phase_table.counts[RankPhase.STARTING] and (self.is_call_running() or self.stage is RunStage.IDLE):
            soonest = min(soonest, self._start_deadline)
        if self.stage is RunStage.RUNNING:
            soonest = min(soonest, self.heartbeats.due_at)
        soonest = min(soonest, self._lease_deadline)
        return soonest if soonest < math.inf else None

    @property
    def _lease_deadline(self) -> float:
        """The time at which StateMachine stops or kills the ranks if no new Lease comes.

        If there are no ranks, this time is infinite.
        """
        if self.stage in (RunStage.AWAITING_DECISION, RunStage.FINISHED):
            return math.inf
        return self._lease.stop_at if self.is_call_running() else self._lease.kill_at

    def is_call_running(self) -> bool:
        """Return whether a call is running and there is no reason yet to stop it."""
        return self.stage in (RunStage.RUNNING, RunStage.AWAITING_ROOT_CAUSE) and self.stop_reason is None

    @property
    def signum(self) -> int | None:
        """The signal of the first interrupt of the call, or None if the call was not interrupted."""
        return None if self._first_interrupt is None else self._first_interrupt.signum

    @property
    def interrupt_cause(self) -> m.InterruptCause:
        """The cause of the first interrupt of the call. Use this property only if the call was interrupted."""
        return m.InterruptCause.SIGNAL if self._first_interrupt is None else self._first_interrupt.cause

    def are_limits_active(self) -> bool:
        """Return whether a call is running and its limits are not suspended."""
        return self.is_call_running() and self._limits_suspended_at is None

    def handle(self, event: Event, now: float) -> list[Action]:
        """Return the actions that follow from an event. Raises IllegalEventError."""
        if isinstance(event, m.StopRequested):
            self._on_stop_request(event, now)
            return []
        if isinstance(event, m.Interrupted | m.Shutdown | m.Abort) and self.stage is RunStage.AWAITING_DECISION:
            self._first_interrupt = event if isinstance(event, m.Interrupted) else None
            self._finish()
            return []
        if isinstance(event, m.Interrupted):
            return self._on_interrupt(event, now)
        if isinstance(event, m.StartCall):
            return self._on_start_call(event, now)
        if isinstance(event, m.CancelAttempt):
            return self._dump_stacks_then_stop(now, StopReason.CANCELLED_BY_JOB) if self.is_call_running() else []
        if isinstance(event, m.CollectivesMismatched):
            return self._dump_stacks_then_stop(now, StopReason.FAILED) if self.are_limits_active() else []
        if isinstance(event, m.Lease):
            self._lease = event
            return []
        if isinstance(event, m.SuspendLimits | m.ResumeLimits):
            self._on_limits(event, now)
            return []
        if isinstance(event, m.Resumed):
            self._on_resumed(event, now)
            return []
        if isinstance(event, m.Shutdown):
            return self._on_shutdown(now)
        if isinstance(event, m.Abort):
            return self._on_abort(now)
        if event.generation < self.generation:
            return []
        if isinstance(event, m.Restart | m.DoNotRestart):
            return self._on_decision(event, now)
        before = self.phase_table.apply(event)
        if before is RankPhase.RUNNING and not isinstance(event, m.HeartbeatRead):
            self.heartbeats.remove(event.rank)
        return self._on_rank_event(event, before, now)

    def handle_deadline(self, now: float) -> list[Action]:
        """Return the actions that are due at the deadline, or an empty list before the deadline."""
        if self.deadline is None or now < self.deadline:
            return []
        if now >= self._lease_deadline:
            return self._on_lease_deadline(now)
        if self.stage is RunStage.TERMINATING:
            return self._abandon() if self.phase_table.counts[RankPhase.KILLED] else self._kill(now)
        if self.stage is RunStage.SHUTTING_DOWN:
            self.overdue_exits = self.phase_table.ranks_in(RankPhase.EXITING)
        if self.stage is RunStage.DUMPING_STACKS:
            return self._stop(now)
        if self.stage is RunStage.SHUTTING_DOWN:
            return self._terminate(now, self.stop_reason)
        if self.stop_reason is not None:  # ranks of a WorkerGroup that did not react to SIGINT within the grace period
            return self._terminate(now, self.stop_reason) + self._kill(now)
        if now >= self._timeout_at:
            return self._dump_stacks_then_stop(now, StopReason.TIMED_OUT)
        if now >= self._stop_deadline:
            return self._on_stop_timeout(now)
        if now >= self._start_deadline and self.phase_table.counts[RankPhase.STARTING]:
            self.never_ready = self.phase_table.ranks_in(RankPhase.STARTING)
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        if self.stage is RunStage.AWAITING_ROOT_CAUSE:
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        running = self.phase_table.ranks_in(RankPhase.RUNNING)
        return [m.ReadHeartbeat(rank) for rank in self.heartbeats.begin_reading(running, now)]

    def _on_limits(self, event: m.SuspendLimits | m.ResumeLimits, now: float) -> None:
        """Suspend the time limits of the call, or end the suspension."""
        suspended_at = self._limits_suspended_at
        if isinstance(event, m.SuspendLimits):
            self._limits_suspended_at = now if suspended_at is None else suspended_at
        elif suspended_at is not None:
            self._limits_suspended_at = None
            self._timeout_at += now - suspended_at
            self._stop_deadline += now - suspended_at
            self._start_deadline += now - suspended_at
            if self.is_call_running():
                self._stage_deadline += now - suspended_at
            self.heartbeats.restart(now)

    def _on_resumed(self, event: m.Resumed, now: float) -> None:
        """Shift the deadlines by the time for which the ranks were suspended.

        Do not shift the times of the Lease, because the other nodes of the job were running all the time.
        """
        seconds = now - event.suspended_at
        self._timeout_at += seconds
        self._stop_deadline += seconds
        self._start_deadline += seconds
        self._stage_deadline += seconds
        if self._limits_suspended_at is not None:  # a prompt of a debugger is open
            self._limits_suspended_at = min(now, self._limits_suspended_at + seconds)
        if self.is_call_running():
            self.heartbeats.restart(now)

    # --- starting calls and generations

    def move_idle_ranks(self, ranks: Iterable[int], other: "StateMachine") -> None:
        """Move ranks of a WorkerGroup to another state machine.

        Call this method only if the old and the new state machine of the ranks have no running call.
        """
        for rank in ranks:
            other.phase_table.add(rank, self.phase_table.remove(rank))
        other._start_deadline, other._limits_suspended_at = self._start_deadline, self._limits_suspended_at

    def _on_start_call(self, event: m.StartCall, now: float) -> list[Action]:
        timeout_at = math.inf if event.timeout is None else event.started_at + event.timeout
        if self.stage is RunStage.AWAITING_DECISION and not self.phase_table.phases:  # several nodes: no ranks yet
            self._timeout_at = timeout_at
            return []
        if self.stage is not RunStage.IDLE:
            raise IllegalEventError(f"{event} in stage {self.stage.name}")
        self._begin_call(timeout_at, now)
        return [self._call_rank(rank) for rank in self.phase_table.ranks_in(RankPhase.READY)]

    def _call_rank(self, rank: int) -> m.CallRank:
        self.phase_table.set_phase(rank, RankPhase.RUNNING)
        return m.CallRank(rank)

    def _on_decision(self, event: m.Restart | m.DoNotRestart, now: float) -> list[Action]:
        if self.stage is RunStage.FINISHED:  # an interrupt came before the decision
            return []
        if self.stage is not RunStage.AWAITING_DECISION:
            raise IllegalEventError(f"{event} in stage {self.stage.name}")
        if isinstance(event, m.DoNotRestart) or not self._may_restart:
            self._finish()
            return []
        self.generation += 1
        timeout_at = self._timeout_at  # restarts do not extend the timeout
        self._begin_generation(event.ranks or list(self.phase_table.phases), now)
        self._begin_call(timeout_at, now)
        return [m.StartRank(rank) for rank in self.phase_table.phases]

    # --- events of a rank

    def _on_rank_event(self, event: RankEvent, before: RankPhase, now: float) -> list[Action]:
        if isinstance(event, m.Exited):
            return self._on_exit(event.rank, before, now)
        if isinstance(event, m.HeartbeatRead):
            return self._on_heartbeat(event, now)
        if self.stage is RunStage.DUMPING_STACKS:
            if isinstance(event, m.Returned) and self.stop_reason is not StopReason.INTERRUPTED:
                self._dumping.add(event.rank)
                return [m.RequestCollectives(event.rank)]
            return self._on_stack_dumped(event.rank, now)
        if isinstance(event, m.StackDumped) or (isinstance(event, m.DetailsReceived) and not self._keep_ranks):
            return []  # stacks that came too late, or details that nothing waits for
        if isinstance(event, m.Failing):
            self._await_root_cause(now)
            return []
        if self.stage is RunStage.TERMINATING:
            # The rank missed or handled SIGTERM. Its function has ended now, so the rank can exit.
            return (
                [m.RequestExit(event.rank)]
                if before is RankPhase.TERMINATING and not isinstance(event, m.DetailsReceived)
                else []
            )
        if isinstance(event, m.Ready):
            return [self._call_rank(event.rank)] if self.is_call_running() else []
        if isinstance(event, m.Failed):
            return self._on_failure(event.is_secondary, now)
        return self._end_call_if_complete(now)

    def _on_exit(self, rank: int, before: RankPhase, now: float) -> list[Action]:
        actions: list[Action] = []
        if self.stage is RunStage.IDLE:
            actions = self._terminate(now, StopReason.FAILED)
        elif self.stage in (RunStage.RUNNING, RunStage.AWAITING_ROOT_CAUSE):
            has_answered = before not in (RankPhase.STARTING, RankPhase.RUNNING)
            actions = self._end_call_if_complete(now) if has_answered else self._on_rank_lost(now)
        elif self.stage is RunStage.DUMPING_STACKS:
            actions = self._on_stack_dumped(rank, now)
        if self.phase_table.have_all_exited():
            self._finish()
            if self.stop_reason in self._decide_after and self.signum is None:
                self.stage = RunStage.AWAITING_DECISION
        return actions

    def _on_rank_lost(self, now: float) -> list[Action]:
        """Stop the other ranks, because a rank has exited before it returned or reported a failure."""
        if self.stop_reason is None:
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        return self._terminate(now, self.stop_reason)

    def _on_failure(self, is_secondary: bool, now: float) -> list[Action]:
        if not is_secondary and not self._keep_ranks:
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        self._await_root_cause(now)
        return self._end_call_if_complete(now)

    def _await_root_cause(self, now: float) -> None:
        if self.stage is RunStage.RUNNING:
            self.stage = RunStage.AWAITING_ROOT_CAUSE
            self._stage_deadline = now + m.ROOT_CAUSE_WAIT_SECONDS

    def _on_heartbeat(self, event: m.HeartbeatRead, now: float) -> list[Action]:
        is_limited = self.stage is RunStage.RUNNING and self._limits_suspended_at is None
        if is_limited and self.heartbeats.add(event.rank, event.beat_at, now):
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        return []

    # --- the end of a call

    def _end_call_if_complete(self, now: float) -> list[Action]:
        """End the call if no rank is starting or running any more."""
        counts = self.phase_table.counts
        if (
            counts[RankPhase.STARTING]
            or counts[RankPhase.RUNNING]
            or (self._keep_ranks and counts[RankPhase.FAILED])  # which still sends the details
        ):
            return []
        if self._keep_ranks:
            return self._become_idle(now)
        if self.stage is RunStage.AWAITING_ROOT_CAUSE:
            return self._dump_stacks_then_stop(now, StopReason.FAILED)
        return self._shut_down(now, StopReason.SUCCEEDED)

    def _become_idle(self, now: float) -> list[Action]:
        """Keep the ranks for the next call. But if a rank has exited, end the other ranks, too."""
        if self.stop_reason is None:
            self.stop_reason = StopReason.FAILED if self.stage is RunStage.AWAITING_ROOT_CAUSE else StopReason.SUCCEEDED
        self.phase_table.move_all(RankPhase.RETURNED, to=RankPhase.READY)
        self.phase_table.move_all(RankPhase.DETAILS_SENT, to=RankPhase.READY)
        if self.phase_table.counts[RankPhase.EXITED]:
            return self._shut_down(now, self.stop_reason)
        self.stage = RunStage.IDLE
        self._stage_deadline = math.inf
        return []

    def _on_shutdown(self, now: float) -> list[Action]:
        """Ask idle ranks to exit, and stop ranks that are starting or running."""
        self._keep_ranks = False
        if self.stage is RunStage.IDLE and not self.phase_table.counts[RankPhase.STARTING]:
            return self._shut_down(now, StopReason.SUCCEEDED)
        is_running = self.stage in (RunStage.IDLE, RunStage.RUNNING, RunStage.AWAITING_ROOT_CAUSE, RunStage.DUMPING_STACKS)
        return self._terminate(now, self.stop_reason or StopReason.INTERRUPTED) if is_running else []

    def _on_abort(self, now: float) -> list[Action]:
        """Stop ranks that are running or idle, and prevent restarts."""
        self._may_restart = False
        if self.is_call_running():
            return self._dump_stacks_then_stop(now, StopReason.INTERRUPTED)
        return self._on_shutdown(now) if self.stage is RunStage.IDLE else []

    def _shut_down(self, now: float, stop_reason: StopReason) -> list[Action]:
        """Ask all ranks in the phases RETURNED and READY to exit, and wait for their exits."""
        self.stage = RunStage.SHUTTING_DOWN
        self.stop_reason = stop_reason
        self._stage_deadline = now + max(self._grace_period, m.EXIT_SECONDS)
        ranks = self.phase_table.move_all(RankPhase.RETURNED, to=RankPhase.EXITING) + self.phase_table.move_all(
            RankPhase.READY, to=RankPhase.EXITING
        )
        return [m.RequestExit(rank) for rank in ranks]

    def _on_interrupt(self, event: m.Interrupted, now: float) -> list[Action]:
        """Stop the ranks after the first signal that interrupts the run. Kill the ranks after the second signal.

        If the first interrupting signal comes when mpwatch has already sent SIGTERM to the ranks, kill the ranks at once.
        But if mpwatch sent SIGTERM because other nodes had ended the attempt, ignore the first interrupting signal. Perhaps
        the other nodes ended the attempt because the same signal had reached them before it reached this node.
        """
        signum = event.signum
        if self.stage is RunStage.FINISHED or (self.stage is RunStage.IDLE and signum == signal.SIGINT):
            return []
        is_first, self._first_interrupt = self._first_interrupt is None, self._first_interrupt or event
        stop_reason = self.stop_reason or StopReason.INTERRUPTED  # a success or a failure before the signal remains one
        if is_first and self.is_call_running():
            return self._dump_stacks_then_stop(now, stop_reason)
        if self.stage is RunStage.TERMINATING and is_first and self.stop_reason is StopReason.CANCELLED_BY_JOB:
            return []
        if self.stage is RunStage.TERMINATING:
            return self._kill(now) if self.phase_table.counts[RankPhase.TERMINATING] else []
        signum_for_running = signal.SIGINT if signum == signal.SIGINT and is_first else signal.SIGTERM
        return self._terminate(now, stop_reason, signum_for_running=signum_for_running) + (
            [] if is_first else self._kill(now)
        )

    def _on_stop_request(self, event: m.StopRequested, now: float) -> None:
        """Record the first request that the ranks of a running call return.

        If the request comes from this node while there are no ranks, change to the stage FINISHED. A request from the leader
        of the job does not change the stage, because all nodes decide together whether they start ranks or finish.
        """
        if self.stage is RunStage.AWAITING_DECISION and not event.is_from_job:
            signum = signal.SIGTERM if event.signum is None else event.signum
            self._first_interrupt = m.Interrupted(signum, m.InterruptCause.STOP_REQUEST)
            self._finish()
        elif self.is_call_running() and self.stop_request is None:
            self.stop_request = event
            self._stop_deadline = now + self._stop_timeout

    def _on_stop_timeout(self, now: float) -> list[Action]:
        """Stop all ranks, because some ranks are still running `stop_timeout` seconds after the stop request."""
        assert self.stop_request is not None
        self.is_stop_overdue = True
        if self.stop_request.signum is None:
            return self._dump_stacks_then_stop(now, StopReason.TIMED_OUT)
        self._first_interrupt = m.Interrupted(self.stop_request.signum, m.InterruptCause.STOP_TIMEOUT)
        return self._dump_stacks_then_stop(now, StopReason.INTERRUPTED)

    def _interrupt_calls(self, now: float) -> list[Action]:
        """Interrupt the functions of all ranks of a WorkerGroup.

        Ranks that return or raise an exception within the grace period stay alive.
        """
        self.stage = RunStage.AWAITING_ROOT_CAUSE
        self._stage_deadline = now + max(self._grace_period, m.MIN_GRACE_SECONDS)
        ranks = self.phase_table.ranks_in(RankPhase.RUNNING)
        signals = [m.SendSignal(rank, number) for rank in ranks for number in (signal.SIGINT, signal.SIGCONT)]
        return signals + self._end_call_if_complete(now)  # they may have answered while the stacks came

    def _on_lease_deadline(self, now: float) -> list[Action]:
        if self.is_call_running():
            return self._dump_stacks_then_stop(now, StopReason.CANCELLED_BY_JOB)
        self._lease = m.NO_LEASE
        terminated = [] if self.stage is RunStage.TERMINATING else self._terminate(now, self.stop_reason)
        return terminated + self._kill(now)

    # --- stopping: DumpStacks, SIGTERM, SIGKILL, AbandonRank

    def _dump_stacks_then_stop(self, now: float, stop_reason: StopReason) -> list[Action]:
        """Ask the running ranks for their stacks. Stop all ranks when the stacks have come, or after STACK_DUMP_SECONDS.

        If the run was not interrupted, also ask each rank that has returned which collectives it called. Perhaps a rank
        failed in a collective because another rank had returned without calling this collective.
        """
        self.stop_reason = stop_reason
        # A request for stacks interrupts system calls. What a rank reports from now on may be a consequence of that.
        self.stopped_at = now
        running, returned = map(self.phase_table.ranks_in, (RankPhase.RUNNING, RankPhase.RETURNED))
        if stop_reason is StopReason.INTERRUPTED:
            returned = []
        self._dumping = {*running, *returned}
        if not self._dumping:
            return self._stop(now)
        self.stage = RunStage.DUMPING_STACKS
        self._stage_deadline = now + STACK_DUMP_SECONDS
        return [*map(m.DumpStacks, sorted(running)), *map(m.RequestCollectives, sorted(returned))]

    def _on_stack_dumped(self, rank: int, now: float) -> list[Action]:
        """Stop all ranks if no more stacks are expected.

        Call this method also when a rank has failed or exited before its stacks have come.
        """
        self._dumping.discard(rank)
        return [] if self._dumping else self._stop(now)

    def _stop(self, now: float) -> list[Action]:
        """Stop the ranks after their stacks have come. If Ctrl-C is the reason for the stop, running ranks get SIGINT."""
        if self.stop_reason is not StopReason.INTERRUPTED or self.signum != signal.SIGINT:
            return self._terminate(now, self.stop_reason)
        counts = self.phase_table.counts
        if self._keep_ranks and not (counts[RankPhase.STARTING] or counts[RankPhase.EXITED]):
            return self._interrupt_calls(now)
        return self._terminate(now, self.stop_reason, signum_for_running=signal.SIGINT)

    def _terminate(
        self, now: float, stop_reason: StopReason | None, signum_for_running: int = signal.SIGTERM
    ) -> list[Action]:
        """Send `signum_for_running` to running ranks, and SIGTERM to all other ranks that are alive.

        Each rank also gets SIGCONT, because a process that SIGSTOP has stopped handles SIGTERM only after SIGCONT.
        """
        self.stage = RunStage.TERMINATING
        self.stop_reason = stop_reason
        self.stopped_at = now if self.stopped_at is None else self.stopped_at
        self._stage_deadline = now + max(self._grace_period, m.MIN_GRACE_SECONDS)
        actions: list[Action] = []
        for rank, phase in self.phase_table.phases.items():
            if phase in m.ALIVE_PHASES:
                if phase in (RankPhase.RETURNED, RankPhase.FAILED, RankPhase.DETAILS_SENT):
                    actions.append(m.RequestExit(rank))
                signum = signum_for_running if phase is RankPhase.RUNNING else signal.SIGTERM  # SIGINT is for functions only
                actions += [m.SendSignal(rank, signum), m.SendSignal(rank, signal.SIGCONT)]
                self.phase_table.set_phase(rank, RankPhase.TERMINATING)
        return actions

    def _kill(self, now: float) -> list[Action]:
        self._stage_deadline = now + m.KILL_SECONDS
        return [
            m.SendSignal(rank, signal.SIGKILL)
            for rank in self.phase_table.move_all(RankPhase.TERMINATING, to=RankPhase.KILLED)
        ]

    def _abandon(self) -> list[Action]:
        self._finish()
        return [m.AbandonRank(rank) for rank in self.phase_table.move_all(RankPhase.KILLED, to=RankPhase.ABANDONED)]

    def _finish(self) -> None:
        self.stage = RunStage.FINISHED
        self._stage_deadline = math.inf


class PhaseTable:
    """The phase of each rank, and the number of ranks in each phase."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.phases = dict.fromkeys(ranks, RankPhase.STARTING)
        self.counts = dict.fromkeys(RankPhase, 0) | {RankPhase.STARTING: len(self.phases)}

    def apply(self, event: RankEvent) -> RankPhase:
        """Move the rank to the phase that TRANSITIONS gives for this event. Return the phase before.

        Raises IllegalEventError if TRANSITIONS has no entry for the event in this phase.
        """
        before = self.phases[event.rank]
        try:
            after = TRANSITIONS[before][type(event)]
        except KeyError:
            raise IllegalEventError(f"{event} in phase {before.name}") from None
        if after is not None:
            self.set_phase(event.rank, after)
        return before

    def ranks_in(self, phase: RankPhase) -> list[int]:
        """Return the ranks that are in this phase."""
        return [rank for rank, current in self.phases.items() if current is phase]

    def move_all(self, phase: RankPhase, *, to: RankPhase) -> list[int]:
        """Move all ranks of one phase to another phase. Return these ranks."""
        ranks = self.ranks_in(phase)
        for rank in ranks:
            self.set_phase(rank, to)
        return ranks

    def set_phase(self, rank: int, phase: RankPhase) -> None:
        """Move one rank to another phase."""
        self.counts[self.phases[rank]] -= 1
        self.counts[phase] += 1
        self.phases[rank] = phase

    def add(self, rank: int, phase: RankPhase) -> None:
        """Add a rank that was removed from another PhaseTable."""
        self.phases[rank] = phase
        self.counts[phase] += 1

    def remove(self, rank: int) -> RankPhase:
        """Remove a rank, and return its phase."""
        phase = self.phases.pop(rank)
        self.counts[phase] -= 1
        return phase

    def have_all_exited(self) -> bool:
        """Return whether all ranks have exited."""
        return self.counts[RankPhase.EXITED] == len(self.phases)
