"""The loop of the watcher thread: it starts ranks, reads what they send, asks the machines of the calls, and acts.

    Inbox: functions of other threads ---.
    channels: messages ------------------+--> _read --> events --> CallMachine of each call --> actions --> _execute
    stack pipes, sockets with crashes ---+
    pidfds: exits -----------------------'

    to the program's threads: Call.evidence and Call.is_over, events, log records (Outbox)

The methods in the first part of EventLoop are posted to its Inbox by other threads. No user code runs here. Guarantees:

- When `run` ends, every rank is dead and reaped. A rank that SIGKILL cannot end is left with a warning (process_pool.py).
- In each wake-up the loop reads everything, then lets the machines decide, and then acts. So every death that could be seen
  is recorded before the loop sends a signal that could kill a rank.
- It waits in one place, `Selector.wait`, until the next deadline of a machine or of a timer. All other waits have a limit: a
  suspension of the whole program ends when the program goes on, and killed child processes of a rank get KILL_SECONDS before
  the rank is started again.
"""

import math
import os
import platform
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from mpwatch.events.types import Progressed, SlowRank, WorkerReady, WorkerStarted
from mpwatch.options.spec import GroupSpec
from mpwatch.os_support.clock import monotonic
from mpwatch.results.failure import format_exit
from mpwatch.results.model import Lateness, RankStatus, WorkerState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.results.stacks import Stacks
from mpwatch.results.texts import format_ranks
from mpwatch.watcher.call import Call, publish_exited
from mpwatch.watcher.diagnosis.failures import may_be_oom_kill
from mpwatch.watcher.diagnosis.oom import OomDetector
from mpwatch.watcher.inbox import Inbox, Timers
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.call_machine import CallMachine
from mpwatch.watcher.observers.collective_monitor import CollectiveMonitor
from mpwatch.watcher.observers.event_bus import EventBus
from mpwatch.watcher.observers.status_snapshot import current_statuses
from mpwatch.watcher.output.rank_output import RankOutput
from mpwatch.watcher.processes.process_pool import ProcessPool
from mpwatch.watcher.processes.rank import Rank
from mpwatch.watcher.processes.rank_environment import RankSetup
from mpwatch.watcher.rank_reader import RankReader
from mpwatch.watcher.suspension import Suspension, suspend_processes
from mpwatch.watcher.visitors import Visitor, Visitors
from mpwatch.wire.messages import MessageKind
from mpwatch.wire.stop_step import HOLD_SECONDS

REPORT_SECONDS = 0.25  # between two looks at what the ranks have reported
RESIST_SECONDS = 1.0  # after Ctrl-C: then the ranks that have not ended are named


class Node(Protocol):
    """In a job of several nodes: what the event loop reports to the thread that talks to the other nodes."""

    def on_stall(self, answers: Mapping[int, RankCollectives], returned: list[int]) -> object:
        """See CollectiveMonitor."""

    def on_outcome_change(self, machine: CallMachine) -> None:
        """It has become clear how an attempt ends, or all its ranks have exited."""

    def on_stop(self, cause: str) -> bool:
        """A stop was requested on this node. Return whether the leader of the job takes care of it."""

    def on_steps_held(self, step: int | None) -> None:
        """All ranks wait, and this is the highest step that one of them has passed."""


class EventLoop:
    """The ranks and the calls of one run or one WorkerGroup. Only the watcher thread uses it.

    Any thread may read `state`, `suspended_seconds` (by Ctrl-Z), `starts` (of `start_ranks`), `interrupted` (what has ended
    the run) and `stop_request` (the first one of the run), and post `timers.call_at`.
    """

    def __init__(
        self,
        spec: GroupSpec,
        inbox: Inbox,
        event_bus: EventBus,
        output: RankOutput,
        *,
        keep_ranks: bool,
        node: Node | None,
    ) -> None:
        self.state = WorkerState.UNKNOWN
        self.suspended_seconds = 0.0
        self.timers = Timers()
        self.debugger_sockets: deque[tuple[int, int]] = deque()  # for the console: rank, descriptor
        self.starts = 0
        self.interrupted: m.Interrupted | None = None
        self.stop_request: m.StopRequested | None = None
        self._spec, self._keep_ranks, self._node = spec, keep_ranks, node
        # The ranks of such a WorkerGroup do not communicate, so a lost rank ends only its own call.
        self._are_independent = keep_ranks and spec.policy.scope == "worker"
        self._inbox, self._outbox, self._event_bus = inbox, event_bus.outbox, event_bus
        self._ranks: dict[int, Rank] = {}  # the latest of each number. A WorkerGroup has only those that are alive
        self._calls: list[Call] = []  # that are not over
        self._answered_calls: list[Call] = []  # whose threads do not know it yet
        self._delayed_starts: dict[Call, Sequence[RankSetup]] = {}  # of a run: calls with their new ranks
        self._waiting_calls: list[Call] = []  # for ranks of a WorkerGroup that are ending
        self._last_call: Call | None = None  # on several nodes
        self._lost_ranks: tuple[int, ...] = ()  # of a WorkerGroup: those that ended first, so that all others end, too
        self._looks_for_heartbeats = False  # in the first call
        self._is_ending = False  # no rank is started any more
        self._lease = m.NO_LEASE
        self._open_prompts = 0  # of debuggers; the limits stand still meanwhile
        self._events: list[m.RankEvent] = []  # that no machine has handled yet
        self._actions: list[tuple[Call, m.Action]] = []  # that were not executed yet
        self._visits: dict[int, Visitor] = {}  # by rank: who waits for its prompt
        self._touched: dict[Call, None] = {}  # calls whose machines have handled something since `_follow`
        self._pool = ProcessPool(self._outbox, output, spec)
        self._oom = OomDetector()
        self._reader = RankReader(
            self._pool,
            spec,
            call_at=self.timers.call_at,
            wake=self._outbox.wake,
            on_stop_request=self._on_stop_request_of_rank,
            debugger_sockets=self.debugger_sockets,
            on_visit=self._on_visit,
        )
        self._run_monitor = None if keep_ranks else self._make_monitor(None)
        self._hostname = platform.node()

    def run(self) -> None:
        """Work until `end` or `shut_down` was posted and no rank is left. Raises LaunchError."""
        with self._pool, Visitors(self._pool.selector, self._answer_visitor):
            self._pool.selector.add(self._inbox.wakeup.fileno(), list)
            self._settle()
            while not self._is_ending or self._pool.alive or self._calls:
                self._reader.start_wakeup()
                for read in self._pool.selector.wait(self._seconds_to_wait()):
                    self._events += read()
                self._settle()

    # ---- posted to the Inbox by other threads

    def start(self, setups: Sequence[RankSetup], call: Call, due_at: float = 0.0) -> None:
        """Start the ranks of a run at a time of CLOCK_MONOTONIC, and call them. If the run ends before, refuse the call."""
        self._delayed_starts[call] = setups
        is_stopping = self.stop_request is not None and call.is_restart and self._node is None
        if self._is_ending or self.interrupted is not None or is_stopping:
            self._refuse_delayed()
        elif due_at <= monotonic():
            self._start_delayed(call)
        else:
            self.timers.call_at(due_at, partial(self._start_delayed, call))

    def _start_delayed(self, call: Call) -> None:
        if (setups := self._delayed_starts.pop(call, None)) is not None:
            self.start_ranks(setups)
            self._begin(call)

    def _refuse_delayed(self) -> None:
        for call in self._delayed_starts:
            self._refuse(call, call.ranks)
        self._delayed_starts.clear()

    def start_ranks(self, setups: Sequence[RankSetup]) -> None:
        self.starts += 1
        if self._is_ending:
            return
        self._lost_ranks = ()
        self._pool.wait_for_helpers()
        for setup in setups:
            self._start_rank(setup)
        if self.state is WorkerState.UNKNOWN:
            self._publish_state()

    def begin(self, call: Call) -> None:
        """Begin a call of idle ranks of a WorkerGroup. It is refused if ranks were lost, once the other ranks have ended."""
        ranks = [self._ranks[number] for number in call.ranks if number in self._ranks]
        if (self._lost_ranks and self._ranks) or any(rank.call is not None for rank in ranks):
            self._waiting_calls.append(call)
        elif len(ranks) < len(call.ranks) or self._is_ending:
            self._refuse(call, set(call.ranks) - self._ranks.keys())  # none are lost if the loop ends
        else:
            for rank in ranks:
                rank.slot.clear()
                rank.observations.stderr_tail.clear()
                rank.reset_observations()
            self._begin(call)

    def interrupt(self, event: m.Interrupted, call: Call | None = None) -> None:
        """Act as if the program had received a signal: for one call, or for the whole run."""
        if event.signum == signal.SIGINT and event.cause is m.InterruptCause.SIGNAL:
            calls = list(self._calls) if call is None else [call]
            self.timers.call_at(monotonic() + RESIST_SECONDS, partial(self._name_resisting_ranks, calls))
        if call is not None:
            self._pass_on(event, call)
            return
        if not self._keep_ranks:
            self.interrupted = self.interrupted or event
            self._refuse_delayed()
        self._handle_all(event)
        self._outbox.wake()

    def _name_resisting_ranks(self, calls: Iterable[Call]) -> None:
        observed = [seen for call in calls if call in self._calls for seen in call.observed.items()]
        if ranks := [rank for rank, seen in observed if not (seen.has_exited or (self._keep_ranks and seen.answer))]:
            text = "waiting up to %g s for %s to end after Ctrl-C; press Ctrl-C again to kill %s"
            them = "it" if len(ranks) == 1 else "them"
            self._outbox.warn(text, self._spec.grace_period, format_ranks(ranks), them)

    def withdraw(self, call: Call) -> None:
        """Refuse a call that has not begun, perhaps because an exception came just before it was posted."""
        if call not in self._calls and not call.is_over:
            self._waiting_calls = [other for other in self._waiting_calls if other is not call]
            self._refuse(call, ())

    def request_stop(self, event: m.StopRequested, call: Call | None = None) -> None:
        """Ask the ranks to save and return: those of one call of a WorkerGroup, or those of the run."""
        if call is not None:
            self._pass_on(event, call)
            return
        known, self.stop_request = self.stop_request, self.stop_request or event
        if self._node is None:
            self._refuse_delayed()
        is_for_leader = self._node is not None and self.starts > 0 and not event.is_from_job
        if is_for_leader and self._node is not None and self._node.on_stop(event.cause):
            return
        if event.is_from_job and known is not None:
            event = replace(event, signum=known.signum)  # if this node has requested it
        self._handle_all(event)
        if event.is_from_job and not any(each.machine.is_running() for each in self._calls):
            if (
                self._last_call is not None and self._last_call.machine.stop_request is None
            ):  # the ranks of this node have ended, and the other nodes wait for its answer
                self._hold_steps(self._last_call, event.cause)
        elif not self._calls and not event.is_from_job and (self.starts or self._node is not None):
            signum = signal.SIGTERM if event.signum is None else event.signum  # between two attempts
            self.interrupted = self.interrupted or m.Interrupted(signum, m.InterruptCause.STOP_REQUEST)
            self._refuse_delayed()
            self._outbox.wake()

    def _on_stop_request_of_rank(self, rank: Rank) -> None:
        event = m.StopRequested(f"request_stop() in rank {rank.number}")
        self._inbox.post(partial(self.request_stop, event, rank.call if self._keep_ranks else None))

    def end_calls(self, reason: m.StopReason) -> None:
        self._refuse_delayed()
        self._handle_all(m.EndCall(reason))

    def end(self) -> None:
        self._is_ending = True

    def shut_down(self) -> None:
        self._is_ending = True
        self._handle_all(m.Shutdown())
        self._end_idle_ranks()

    def suspend(self, suspension: Suspension) -> None:
        """Ctrl-Z was pressed: stop all ranks until the program goes on, and shift all deadlines by that time."""
        suspend_processes(suspension, [rank.process for rank in self._pool.alive.values()])
        seconds = monotonic() - suspension.requested_at
        self.suspended_seconds += seconds
        self.timers.shift(seconds)
        self._handle_all(m.Resumed(suspension.requested_at))
        for call in self._calls:
            call.due_at = call.machine.deadline
            call.monitor.restart_waits()

    def suspend_limits(self, *, are_suspended: bool) -> None:
        """A prompt of a debugger was opened or closed. Several may be open, of the console and of visitors."""
        self._open_prompts += 1 if are_suspended else -1
        self._handle_all(m.SuspendLimits(self._open_prompts > 0))

    def renew_lease(self, lease: m.Lease) -> None:
        self._lease = lease
        self._handle_all(lease)

    def agree_on_step(self, step: int | None, cause: str) -> None:
        """Make the ranks stop after the step that all nodes have agreed on. None: at their next call of `should_stop`."""
        if self._last_call is not None:
            self._last_call.stop_after_step(step, cause, self._outbox)

    def send_statuses(self, receive: Callable[[Sequence[RankStatus]], object], numbers: Iterable[int] | None = None) -> None:
        """Of these ranks, or of all."""
        known = self._ranks
        receive(current_statuses(known[number] for number in (known if numbers is None else numbers) if number in known))
        self._outbox.wake()

    def send_stacks(self, receive: Callable[[Stacks], object]) -> None:
        self._reader.send_stacks(receive, self._ranks.values())

    def _answer_visitor(self, question: Mapping[str, Any], visitor: Visitor) -> None:
        """Answer another program, see running_jobs.py. None: it asks what this version does not know."""
        asked = question.get("ask")
        if asked == "status":
            statuses = current_statuses(self._ranks.values())
            started_at = self._event_bus.wall_time(self._event_bus.started_at)
            visitor.answer((self._event_bus.run_id, self._spec.fn_name, started_at, self.state, statuses))
        elif asked == "stacks":
            self._inbox.post(partial(self.send_stacks, visitor.answer))
        elif asked == "stop":
            event = m.StopRequested(f"request_stop() in process {visitor.pid}")
            if self._keep_ranks:
                for call in self._calls:
                    self._inbox.post(partial(self.request_stop, event, call))
            else:
                self._inbox.post(partial(self.request_stop, event))
            visitor.answer(not self._keep_ranks or bool(self._calls))
        elif asked == "debug":
            number = question.get("rank")
            rank = self._ranks.get(number) if isinstance(number, int) else None
            is_opening = rank is not None and rank.request_visit()
            if rank is not None and is_opening:
                self._visits[rank.number] = visitor
            visitor.answer(is_opening)
        else:
            visitor.answer(None)

    def _on_visit(self, rank: Rank, fd: int) -> None:
        """A rank has opened a prompt for a visitor. The limits stand still until the visitor goes."""
        visitor = self._visits.pop(rank.number, None)
        if fd == -1:  # it was lost, for want of descriptors
            return
        if visitor is not None and visitor.pass_fd(fd):
            self._inbox.post(partial(self.suspend_limits, are_suspended=True))
            visitor.on_gone = partial(self._inbox.post, partial(self.suspend_limits, are_suspended=False))
        os.close(fd)

    # ---- calls and ranks

    def _start_rank(self, setup: RankSetup) -> None:
        rank = self._pool.start(setup)
        self._ranks[rank.number] = rank
        count, pid = setup.worker.restart_count, rank.observations.pid
        self._event_bus.publish(WorkerStarted, [rank.number], attempt=count, pid=pid)
        self._reader.register(rank)

    def _begin(self, call: Call) -> CallMachine:
        spec = self._spec
        members = [self._ranks[number] for number in call.ranks]
        suspended = self.suspended_seconds - call.suspended_before
        machine = CallMachine(
            {rank.number: m.RankPhase.READY if rank.is_ready else m.RankPhase.STARTING for rank in members},
            now=monotonic(),
            grace_period=spec.grace_period,
            timeout_at=math.inf if call.timeout is None else call.started_at + call.timeout + suspended,
            start_deadline=min(rank.started_at for rank in members) + spec.start_timeout,
            heartbeat_timeout=spec.heartbeat_timeout,
            stop_timeout=spec.stop_policy.timeout,
            keep_ranks=self._keep_ranks,
            lease=self._lease,
            are_limits_suspended=self._open_prompts > 0,
        )
        call.begin(members, machine, self._run_monitor or self._make_monitor(call), spec, self._event_bus)
        self._calls.append(call)
        self._touched[call] = None
        if call.payload is None:
            return machine
        self._last_call = call if self._node is not None else None
        call.publish_started()
        call.monitor.begin_call()
        if any(rank.collective_socket.is_open for rank in members):
            call.monitor.start()
        self._actions += [(call, action) for action in machine.begin()]
        if call.stop_after is not None and not call.is_restart:
            event = m.StopRequested(f"StopPolicy(after={call.stop_after:g})")
            self.timers.call_at(call.started_at + call.stop_after, partial(self.request_stop, event))
        if spec.heartbeat_timeout is not None and not self._looks_for_heartbeats:
            self._looks_for_heartbeats = True
            self.timers.call_at(monotonic() + spec.heartbeat_timeout, partial(self._warn_without_heartbeats, call))
        if self._event_bus.wants(Progressed):
            self.timers.call_at(monotonic() + REPORT_SECONDS, partial(self._publish_reports, call))
        if self.stop_request is not None and self._node is None:
            self._handle(call, self.stop_request)
        while call.before_begin:
            self._handle(call, call.before_begin.pop(0))
        return machine

    def _warn_without_heartbeats(self, call: Call) -> None:
        limit, ranks = self._spec.heartbeat_timeout or 0.0, [self._ranks[rank] for rank in call.ranks if rank in self._ranks]
        if call not in self._calls:
            return
        if not all(rank.is_ready for rank in ranks):
            self.timers.call_at(monotonic() + limit, partial(self._warn_without_heartbeats, call))
        elif all(rank.slot.read_heartbeat().beat_at is None for rank in ranks):
            text = "no rank has called report() or heartbeat() in %g s, so heartbeat_timeout=%g does not apply yet"
            self._outbox.warn(text, limit, limit)

    def _publish_reports(self, call: Call) -> None:
        if call.evidence is None:
            for rank in call.members.values():
                if not rank.is_reaped:
                    self._reader.read_slot(rank)
            call.publish_reports()
            self.timers.call_at(monotonic() + REPORT_SECONDS, partial(self._publish_reports, call))

    def _pass_on(self, event: m.Event, call: Call) -> None:
        if call in self._calls:
            self._handle(call, event)
        elif not call.is_over:
            call.before_begin.append(event)

    def _handle_all(self, event: m.Event) -> None:
        for call in self._calls:
            self._handle(call, event)

    def _handle(self, call: Call, event: m.Event) -> None:
        self._actions += [(call, action) for action in call.handle(event, monotonic())]
        self._touched[call] = None

    def _refuse(self, call: Call, lost_ranks: Iterable[int]) -> None:
        call.lost_ranks, call.refused_at_start = tuple(sorted(lost_ranks)), self.starts
        call.is_refused = True  # last: from here on the caller's thread acts
        self._outbox.wake()

    def _end_idle_ranks(self, *, has_lost_one: bool = False) -> None:
        """Let the idle ranks of a WorkerGroup exit, or stop them."""
        idle = [number for number, rank in self._ranks.items() if rank.call is None]
        if not idle:
            return
        call = Call(None, idle, started_at=monotonic())
        for number in idle:
            self._ranks[number].reset_observations()
        actions = self._begin(call).end_idle_ranks(monotonic(), has_lost_one=has_lost_one)
        self._actions += [(call, action) for action in actions]

    def _lose_all(self, lost_ranks: Iterable[int], but: Call | None = None) -> None:
        """End all other calls and ranks of a WorkerGroup with scope="group", because a rank was lost. Only once."""
        if self._lost_ranks or self._are_independent:
            return
        self._lost_ranks = tuple(sorted(lost_ranks))
        for call in list(self._calls):
            if call is not but:
                if call.machine.is_running():
                    call.lost_elsewhere = self._lost_ranks
                self._handle(call, m.EndCall(m.StopReason.INTERRUPTED))
        self._end_idle_ranks(has_lost_one=but is None)

    def _make_monitor(self, call: Call | None) -> CollectiveMonitor:
        """Make the monitor of the collectives of one call of a WorkerGroup, or of a run if `call` is None."""

        def is_checking() -> bool:
            calls = self._calls if call is None else [call]
            return bool(calls) and all(each.machine.are_limits_active() for each in calls)

        def end_call() -> None:
            for each in list(self._calls):
                if call is None or each is call:
                    self._inbox.post(partial(self._pass_on, m.EndCall(m.StopReason.FAILED), each))

        def publish_slow_rank(lateness: Lateness) -> None:
            attempt = self._ranks[lateness.rank].setup.worker.restart_count
            self._event_bus.publish(SlowRank, [lateness.rank], attempt=attempt, lateness=lateness)

        stall_after = self._spec.torch_backend.stall_after
        return CollectiveMonitor(
            # Ranks of other calls are included, since ranks of this call may wait for them in a collective.
            lambda: [self._pool.alive[number] for number in sorted(self._pool.alive)],
            math.inf if stall_after is None else stall_after,
            self._outbox,
            is_called=lambda number: call is None or number in call.members,
            is_checking=is_checking,
            call_at=self.timers.call_at,
            end_call=end_call,
            on_slow_rank=publish_slow_rank,
            on_stall=None if self._node is None else self._node.on_stall,
        )

    # ---- one wake-up

    def _seconds_to_wait(self) -> float:
        if self._events or self._actions:
            return 0.0
        return min([self.timers.due_at, *(call.due_at for call in self._calls)]) - monotonic()

    def _settle(self) -> None:
        """After everything was read: decide, act, and answer the calls that are over."""
        events, self._events = self._events, []
        dead = [self._ranks[event.rank] for event in events if isinstance(event, m.Exited)]
        self._oom.add_suspects(rank.observations for rank in dead if may_be_oom_kill(rank.observations))
        late_events = [event for event in events if not self._handle_rank_event(event)]
        for event in late_events:
            if (call := self._ranks[event.rank].call) is not None:
                self._follow(call)
            self._handle_rank_event(event)
        self.timers.run_due(monotonic())
        self._inbox.run_all()
        now = monotonic()
        for call in self._calls:
            if call.due_at <= now:
                self._actions += [(call, action) for action in call.machine.handle_deadline(now)]
                self._touched[call] = None
        actions, self._actions = self._actions, []
        for call, action in actions:
            self._execute(call, action)
        for rank in dead:
            self._pool.reap(rank)
        touched, self._touched = self._touched, {}
        for call in touched:
            self._follow(call)
        if self._waiting_calls:
            waiting, self._waiting_calls = self._waiting_calls, []
            for call in waiting:
                self.begin(call)
        self._publish_state()
        if self._answered_calls and not (self._lost_ranks and self._ranks):  # otherwise ranks of other calls are ending
            for call in self._answered_calls:
                call.is_over = True
            self._answered_calls.clear()
            self._outbox.wake()

    def _handle_rank_event(self, event: m.RankEvent) -> bool:
        """Return False if the call of a rank is over, and the rank must become idle first: it exits in the same wake-up."""
        rank = self._ranks[event.rank]
        if rank.call is not None:
            if self._keep_ranks and rank.call.machine.is_over():
                return False
            self._handle(rank.call, event)
        elif isinstance(event, m.Ready):
            self._event_bus.publish(WorkerReady, [rank.number], attempt=rank.setup.worker.restart_count)
        elif isinstance(event, m.Exited):
            self._on_idle_exit(rank)
        return True

    def _on_idle_exit(self, rank: Rank) -> None:
        observed = rank.observations
        how = "ended" if observed.exit_code is None else format_exit(observed.exit_code)
        which = "it" if self._are_independent else "all ranks"
        text = "rank %d (pid %s) %s while it had no call; the next call restarts %s"
        self._outbox.warn(text, rank.number, observed.pid, how, which)
        publish_exited(self._event_bus, rank)
        del self._ranks[rank.number]
        self._lose_all([rank.number])

    # ---- what the machines want

    def _execute(self, call: Call, action: m.Action) -> None:
        if isinstance(action, m.ReadHeartbeats):
            beats = {rank: call.members[rank].slot.read_heartbeat().beat_at for rank in action.ranks}
            self._handle(call, m.HeartbeatsRead(beats))
            return
        rank = call.members[action.rank]
        observed = rank.observations
        if rank.is_reaped or rank.call is not call:  # it has ended, or the call is over, since the machine decided this
            return
        if isinstance(action, m.CallRank):
            assert call.payload is not None
            rank.send_call(call.number, call.payload)
        elif isinstance(action, m.RequestExit):
            rank.send(MessageKind.SHUTDOWN)
        elif isinstance(action, m.DumpStacks):
            if observed.has_exited:  # in this wake-up
                return
            if observed.answer is None:
                observed.is_dump_for_report = True
                if not self._reader.request_stacks(rank):
                    self._events.append(m.StackDumped(rank.number))
                    return
            rank.awaits_dump = True
            self._reader.request_collectives([rank])
            self._events += self._reader.end_dump(rank)
        elif isinstance(action, m.SendSignal):
            self._send_signal(call, rank, action.signum)
        else:
            assert isinstance(action, m.AbandonRank)
            self._reader.finish_observations(rank)
            self._pool.abandon(rank)

    def _send_signal(self, call: Call, rank: Rank, signum: int) -> None:
        if signum == signal.SIGINT:
            rank.interrupt_call(call.number)
        else:
            rank.process.send_signal_to_group(signum)
        observed = rank.observations
        observed.signals_sent.add(signum)
        observed.first_signal_at = observed.first_signal_at or monotonic()

    def _follow(self, call: Call) -> None:
        """Do what the new stage of a call requires, such as answering it."""
        if call not in self._calls:
            return
        machine = call.machine
        call.due_at = machine.deadline
        stage, outcome = machine.stage, (machine.stop_reason, machine.signum)
        stage_before, outcome_before, request_before = call.known_stage, call.known_outcome, call.known_stop_request
        call.known_stage, call.known_outcome, call.known_stop_request = stage, outcome, machine.stop_request
        is_new_stage = stage is not stage_before
        if machine.stop_request is not None and request_before is None:
            self._hold_steps(call, machine.stop_request.cause)
        is_stop_beginning = outcome_before[0] is None or stage_before is m.CallStage.DUMPING_STACKS
        if machine.is_stop_overdue and is_stop_beginning and stage is not m.CallStage.DUMPING_STACKS:
            for rank in call.members.values():
                if not rank.is_reaped:
                    self._reader.take_stacks(rank)
            call.log_overdue_ranks(self._outbox)
        if self._node is not None and (outcome != outcome_before or (is_new_stage and stage is m.CallStage.FINISHED)):
            self._node.on_outcome_change(machine)
        if is_new_stage and stage in (m.CallStage.AWAITING_ROOT_CAUSE, m.CallStage.DUMPING_STACKS):
            self._reader.request_collectives(call.members.values())
        if self._keep_ranks and stage in (m.CallStage.SHUTTING_DOWN, m.CallStage.TERMINATING, m.CallStage.FINISHED):
            exited = [number for number, observed in call.observed.items() if observed.has_exited]
            self._lose_all(exited or call.ranks, but=call)
        if machine.is_over():
            self._answer(call)

    def _answer(self, call: Call) -> None:
        is_kept = call.machine.stage is m.CallStage.KEPT
        if is_kept:
            for rank in call.members.values():
                self._reader.read_slot(rank)
                self._reader.take_stacks(rank)
        else:
            call.log_exit_problems(self._outbox)
        if call.payload is not None:
            call.publish_reports()
        call.evidence = call.make_evidence(self._hostname, "" if is_kept else self._oom.take_other_kills())
        self._calls.remove(call)
        if self._keep_ranks:
            call.monitor.close()
            for number, rank in call.members.items():
                rank.call = None
                if not is_kept:
                    del self._ranks[number]
        if not is_kept:
            call.ended_ranks = call.ranks
        self._answered_calls.append(call)
        if is_kept and (self._lost_ranks or self._is_ending):
            self._end_idle_ranks()

    def _hold_steps(self, call: Call, cause: str) -> None:
        """Make each rank wait at its next call of `should_stop`, and let them agree HOLD_SECONDS later."""
        for rank in call.members.values():
            rank.slot.hold_steps()
        self.timers.call_at(monotonic() + HOLD_SECONDS, partial(self._agree, call, cause))

    def _agree(self, call: Call, cause: str) -> None:
        if any(self._ranks.get(number) is not rank or rank.call is not call for number, rank in call.members.items()):
            return  # the ranks have another call meanwhile
        steps = [step for rank in call.members.values() if (step := rank.slot.read_passed_step()) is not None]
        if self._node is None:
            call.stop_after_step(max(steps, default=None), cause, self._outbox)
        else:
            self._node.on_steps_held(max(steps, default=None))

    def _publish_state(self) -> None:
        state = self._find_state()
        if state is not self.state:
            self.state = state
            self._event_bus.change_state(state, [rank.setup.worker for rank in self._ranks.values()])
            self._outbox.wake()

    def _find_state(self) -> WorkerState:
        """UNHEALTHY while ranks are missing or one is restarted alone, INIT while all are started or restarted together."""
        ranks = self._ranks.values()
        if not self.starts or (not ranks and not self._keep_ranks):
            return self.state
        if self._keep_ranks and len(ranks) < int(self._spec.nprocs) and not self._is_ending:
            return WorkerState.UNHEALTHY
        calls = dict.fromkeys(rank.call for rank in ranks)
        states = {call.machine.state for call in calls if call is not None}
        if any(rank.call is None for rank in ranks):
            is_starting = any(rank.call is None and not rank.is_ready for rank in ranks)
            states.add(WorkerState.INIT if is_starting else WorkerState.HEALTHY)
        is_rank_restarting = len(calls) > 1 and any(
            call is not None and call.is_restart and call.machine.state is WorkerState.INIT for call in calls
        )
        if WorkerState.UNHEALTHY in states or is_rank_restarting:
            return WorkerState.UNHEALTHY
        if not states:
            return self.state
        return WorkerState.INIT if WorkerState.INIT in states else WorkerState.HEALTHY
