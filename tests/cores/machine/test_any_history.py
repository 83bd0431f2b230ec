"""Any order of events, tried by Hypothesis: the machine of a call, used as the event loop uses it, and the diagnosis afterwards."""

import math
import signal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cores.diagnosis.evidence import LOST_PEER, observe
from cores.machine.state_transitions import TRANSITIONS
from mpwatch import WorkerState
from mpwatch.watcher.diagnosis.collective_verdict import CollectiveVerdict, Key, VerdictKind
from mpwatch.watcher.diagnosis.diagnose import diagnose
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.call_machine import CallMachine
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.messages import Message, MessageKind
from mpwatch.wire.pickling import return_values

GRACE, START_TIMEOUT, LIMIT = 3.0, 30.0, 5.0
ENCODERS = {False: ExceptionEncoder(ValueError("the batch is bad")), True: ExceptionEncoder(LOST_PEER)}
RETURNED = return_values.pack(7).body
MISMATCH = CollectiveVerdict(VerdictKind.MISMATCH, Key(1, "default", "gloo", ()), "x", {0: "called something else"}, 0.0)
MAY_REPORT = (m.RankPhase.RUNNING, m.RankPhase.TERMINATING, m.RankPhase.KILLED)  # a rank in these phases may still report
WAS_STOPPED = {m.RankPhase.EXITING, m.RankPhase.TERMINATING, m.RankPhase.KILLED}
SECONDS = st.floats(0.5, 30)


def rule_for_a_rank(list_ranks, **more):
    def decorate(act):
        def act_of_one(self, data, **drawn):
            act(self, data.draw(st.sampled_from(list_ranks(self))), **drawn)

        act_of_one.__name__ = act.__name__
        return precondition(list_ranks)(rule(data=st.data(), **more)(act_of_one))

    return decorate


class History(RuleBasedStateMachine):
    """Ranks do anything that the event loop could observe. The machine's actions are recorded."""

    @initialize(
        keep=st.booleans(),
        n=st.integers(2, 5),
        timeout=st.none() | SECONDS,
        limit=st.none() | st.just(LIMIT),
        stop_timeout=st.none() | SECONDS,
        ready=st.integers(0, 5),
        signals=st.integers(0, 2),
        exits=st.integers(0, 2),
    )
    def begin(self, *, keep, n, timeout, limit, stop_timeout, ready, signals, exits):
        self.now = 1.0
        self.are_limits_suspended, self.resumed_at = False, 0.0
        self.keep, self.timeout, self.limit, self.stop_timeout = keep, timeout, limit, stop_timeout
        self.state = WorkerState.INIT
        self.signals, self.exits = signals, exits  # how many may still come; without a limit most histories are soon over
        self.observed = {rank: {"was_ready": False} for rank in range(n)}
        self.begin_call()
        for rank in range(min(n, ready)):
            self.become_ready_now(rank)

    def begin_call(self):
        phases = {rank: m.RankPhase.READY if it["was_ready"] else m.RankPhase.STARTING for rank, it in self.observed.items()}
        self.machine = CallMachine(
            phases,
            now=self.now,
            grace_period=GRACE,
            timeout_at=math.inf if self.timeout is None else self.now + self.timeout,
            start_deadline=self.now + START_TIMEOUT,
            heartbeat_timeout=self.limit,
            stop_timeout=self.stop_timeout,
            keep_ranks=self.keep,
            are_limits_suspended=self.are_limits_suspended,
        )
        self.verdict, self.is_diagnosed, self.actions = None, False, []
        self.observed = {rank: {"was_ready": it["was_ready"], "signals_sent": set()} for rank, it in self.observed.items()}
        self.has_answered, self.has_sent_details, self.asked_for_stacks = set(), set(), set()
        self.heartbeats = dict.fromkeys(self.observed)
        self.execute(self.machine.begin())

    # --- what the event loop does

    def send(self, event):
        self.execute(self.machine.handle(event, self.now))
        if self.machine.stage is m.CallStage.KEPT:
            assert self.keep
            assert set(self.machine.phase_table.phases.values()) == {m.RankPhase.READY}
            self.diagnose()

    def execute(self, actions):
        self.actions += actions
        for action in actions:
            if isinstance(action, m.SendSignal):
                self.observed[action.rank]["signals_sent"].add(action.signum)
            elif isinstance(action, m.DumpStacks):
                self.asked_for_stacks.add(action.rank)
        for action in actions:
            if isinstance(action, m.ReadHeartbeats):
                self.send(m.HeartbeatsRead({rank: self.heartbeats[rank] for rank in action.ranks}))
        before, self.state = self.state, self.machine.state
        if self.state is not before:
            assert self.state in TRANSITIONS[before]

    def ranks_in(self, *phases):
        return [rank for rank, phase in self.machine.phase_table.phases.items() if phase in phases]

    # --- the caller, the job and time

    @precondition(lambda self: self.machine.stage is m.CallStage.KEPT)
    @rule()
    def call_again(self):
        self.begin_call()

    @precondition(lambda self: self.keep)
    @rule()
    def shut_down(self):
        self.send(m.Shutdown())

    @rule(event=st.sampled_from([m.EndCall(m.StopReason.INTERRUPTED), m.EndCall(m.StopReason.CANCELLED_BY_JOB)]))
    def end(self, event):
        self.send(event)

    @rule(signum=st.none() | st.sampled_from([signal.SIGINT, signal.SIGUSR1]))
    def request_stop(self, signum):
        was_running = self.machine.is_running()
        self.send(m.StopRequested("a reason", signum))
        assert not was_running or self.machine.stop_request is not None

    @precondition(lambda self: self.signals)
    @rule(signum=st.sampled_from([signal.SIGINT, signal.SIGTERM]))
    def signal_host(self, signum):
        self.signals -= 1
        self.send(m.Interrupted(signum))

    @rule()
    def suspend_or_resume_limits(self):
        self.are_limits_suspended = not self.are_limits_suspended
        self.send(m.SuspendLimits(self.are_limits_suspended))
        self.resumed_at = self.now

    @rule(seconds=st.floats(0.001, 1000.0))
    def suspend_the_program(self, seconds):
        left = self.seconds_to_deadline()
        self.now += seconds
        self.resumed_at = self.now
        self.send(m.Resumed(self.now - seconds))
        assert self.machine.stage is m.CallStage.RUNNING or abs(self.seconds_to_deadline() - left) < 1e-6

    def seconds_to_deadline(self):
        return 0.0 if self.machine.deadline == math.inf else self.machine.deadline - self.now

    @rule(seconds=st.floats(0.001, 2.0))
    def let_time_pass(self, seconds):
        self.now = max(self.now, min(self.now + seconds, self.machine.deadline))
        self.execute(self.machine.handle_deadline(self.now))

    @rule()
    def reach_deadline(self):
        if self.machine.deadline < math.inf:
            self.now = max(self.now, self.machine.deadline)
            self.execute(self.machine.handle_deadline(self.now))

    @rule()
    def find_a_mismatch(self):
        if self.machine.are_limits_active():
            self.verdict = MISMATCH
        self.send(m.EndCall(m.StopReason.FAILED))

    # --- ranks

    @rule_for_a_rank(lambda self: self.ranks_in(m.RankPhase.STARTING))
    def become_ready(self, rank):
        self.become_ready_now(rank)

    def become_ready_now(self, rank):
        self.observed[rank]["was_ready"] = True
        self.send(m.Ready(rank))

    def ranks_that_may_report(self):
        return [
            rank for rank in self.ranks_in(*MAY_REPORT) if m.CallRank(rank) in self.actions and rank not in self.has_answered
        ]

    def answer(self, rank, kind, body, **more):
        self.observed[rank] |= {"answer": Message(kind, self.now, body), **more}
        self.has_answered.add(rank)

    @rule_for_a_rank(ranks_that_may_report, is_secondary=st.booleans(), announced=st.booleans())
    def raise_error(self, rank, is_secondary, announced):
        if announced:
            self.send(m.Failing(rank))
        encoder = ENCODERS[is_secondary]
        self.answer(rank, MessageKind.RAISED, encoder.plain(), details=encoder.details())
        self.send(m.Failed(rank, is_secondary=is_secondary))

    def ranks_that_may_send_details(self):
        failed = self.ranks_in(m.RankPhase.FAILED, m.RankPhase.TERMINATING, m.RankPhase.KILLED)
        return [rank for rank in failed if "details" in self.observed[rank] and rank not in self.has_sent_details]

    @rule_for_a_rank(ranks_that_may_send_details)
    def send_details(self, rank):
        self.has_sent_details.add(rank)
        self.send(m.DetailsReceived(rank))

    @rule_for_a_rank(ranks_that_may_report)
    def return_value(self, rank):
        self.answer(rank, MessageKind.RETURNED, RETURNED)
        self.send(m.Returned(rank))

    def ranks_that_may_exit(self):  # after a call that keeps its ranks, an exit is no event of the call
        return self.ranks_in(*m.ALIVE_PHASES - WAS_STOPPED) if self.exits and not self.machine.is_over() else []

    @rule_for_a_rank(ranks_that_may_exit, code=st.sampled_from([-signal.SIGKILL, -signal.SIGSEGV, 0, 3]))
    def exit_unasked(self, rank, code):
        self.exits -= 1
        self.exit(rank, code)

    @rule_for_a_rank(lambda self: self.ranks_in(*WAS_STOPPED))
    def exit_after_stop(self, rank):
        self.exit(rank, -signal.SIGTERM)

    def exit(self, rank, code):
        self.observed[rank] |= {"died_at": self.now, "exit_code": code}
        self.send(m.Exited(rank))

    @rule_for_a_rank(lambda self: self.ranks_in(m.RankPhase.RUNNING))
    def send_heartbeat(self, rank):
        self.heartbeats[rank] = self.now

    def ranks_that_may_send_stacks(self):
        return sorted(self.asked_for_stacks & set(self.ranks_in(*m.ALIVE_PHASES - {m.RankPhase.EXITING})))

    @rule_for_a_rank(ranks_that_may_send_stacks)
    def dump_stacks(self, rank):
        self.asked_for_stacks.remove(rank)
        self.send(m.StackDumped(rank))

    # --- what is always true

    @invariant()
    def every_wait_has_a_deadline(self):
        machine, phases = self.machine, self.machine.phase_table.phases.values()
        if self.are_limits_suspended and machine.is_running():
            assert machine.deadline == math.inf  # the user may take any time
        elif machine.stage is m.CallStage.RUNNING and machine.deadline == math.inf:
            assert m.RankPhase.RUNNING in phases
            assert m.RankPhase.STARTING not in phases
        else:
            assert machine.is_over() or machine.deadline < math.inf

    @invariant()
    def every_silence_is_noticed(self):
        if self.are_limits_suspended or self.machine.stage is not m.CallStage.RUNNING or self.limit is None:
            return
        running = self.ranks_in(m.RankPhase.RUNNING)
        heartbeats = [max(self.heartbeats[rank], self.resumed_at) for rank in running if self.heartbeats[rank] is not None]
        late = [beat for beat in heartbeats if self.now >= beat + LIMIT]
        assert not late or self.machine.deadline <= max(self.now, min(late) + LIMIT + m.CONFIRM_SECONDS)

    @invariant()
    def no_action_is_repeated(self):
        # a rank that is asked to exit, and does not, is stopped; a stopped rank that then answers is asked to exit; a rank that
        # returns instead of sending its stacks is asked again
        may_repeat = m.ReadHeartbeats | m.RequestExit | m.DumpStacks
        sent = [action for action in self.actions if not isinstance(action, may_repeat)]
        once = [action for action in sent if getattr(action, "signum", 0) != signal.SIGCONT]
        assert len(once) == len(set(once)), once
        assert all(self.actions.count(kind(rank)) <= 2 for kind in (m.RequestExit, m.DumpStacks) for rank in self.observed)
        for rank in self.observed:
            stops = {m.SendSignal(rank, signal.SIGINT), m.SendSignal(rank, signal.SIGTERM)} & set(once)
            assert len(stops) <= 1 + self.keep  # a rank that may stay after an interrupt gets SIGTERM if it does not answer

    @invariant()
    def no_stopped_rank_is_called(self):
        stopped = set()
        for action in self.actions:
            if isinstance(action, m.SendSignal):
                stopped.add(action.rank)
            assert not (isinstance(action, m.CallRank) and action.rank in stopped)

    # --- the end

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        self.send(m.SuspendLimits(False))
        for attempt in range(10):  # no rank does anything any more
            if attempt == 5 and self.machine.stage is m.CallStage.RUNNING:
                self.send(m.Interrupted(signal.SIGINT))
            if self.machine.stage is m.CallStage.KEPT:
                return
            self.reach_deadline()
        assert self.machine.stage is m.CallStage.FINISHED
        assert set(self.machine.phase_table.phases.values()) <= {m.RankPhase.EXITED, m.RankPhase.ABANDONED}
        assert self.machine.stop_reason is not None
        assert sum(isinstance(action, m.AbandonRank) for action in self.actions) <= len(self.observed)
        self.diagnose()

    def diagnose(self):
        """Check once that no report is lost, and no victim the root cause while another failure before the stop is known."""
        if self.is_diagnosed:
            return
        self.is_diagnosed = True
        machine = self.machine
        result = diagnose(
            observe(
                *self.observed.values(),
                stop_reason=machine.stop_reason,
                stopped_at=machine.stopped_at,
                silent_ranks=machine.heartbeats.silent_ranks,
                never_ready=machine.never_ready,
                signum=machine.signum,
                collective_verdict=self.verdict,
                passed_limit="timeout" if machine.is_overdue else "",
                heartbeat_timeout=self.limit,
            )
        )
        str(result)
        stopped_at = self.now if machine.stopped_at is None else machine.stopped_at
        answers = {rank: it["answer"] for rank, it in self.observed.items() if "answer" in it}
        reported = {rank for rank, it in answers.items() if it.stamp <= stopped_at and it.body != RETURNED}
        assert reported <= set(result.failures)
        if result.state is WorkerState.SUCCEEDED:
            assert dict(result.return_values) == dict.fromkeys(self.observed, 7)
        elif machine.stop_reason is m.StopReason.FAILED:
            assert result.root_cause is not None
        ended_at = {rank: it.get("died_at", stopped_at) for rank, it in self.observed.items()}
        ended_at |= {rank: answer.stamp for rank, answer in answers.items()}
        failures = result.failures.items()
        has_own = any(not failure.is_secondary and ended_at[rank] <= stopped_at for rank, failure in failures)
        assert not has_own or result.root_cause is None or not result.root_cause.is_secondary


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=150, stateful_step_count=40)
