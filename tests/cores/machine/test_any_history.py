"""Any order of events, tried by Hypothesis: the machine of a call, used as the event loop uses it, and the diagnosis afterwards."""

import signal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mpwatch import Worker, WorkerState
from mpwatch.results.state_transitions import check_transition
from mpwatch.watcher.diagnosis.collective_verdict import CollectiveVerdict, VerdictKind
from mpwatch.watcher.diagnosis.diagnose import diagnose
from mpwatch.watcher.diagnosis.observations import AttemptObservations, RankObservations
from mpwatch.watcher.machine import transitions as m
from mpwatch.watcher.machine.call_machine import CallMachine
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from mpwatch.wire.messages import Message, MessageKind
from mpwatch.wire.pickling import return_values

GRACE = 3.0
START_TIMEOUT = 30.0
LIMIT = 5.0
CONNECTION_LOST_ERROR = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
ENCODERS = {False: ExceptionEncoder(ValueError("the batch is bad")), True: ExceptionEncoder(CONNECTION_LOST_ERROR)}
RETURNED = return_values.pack(7).body
EXIT_CODES = st.sampled_from([-signal.SIGKILL, -signal.SIGSEGV, 0, 3])
MAY_REPORT = (m.RankPhase.RUNNING, m.RankPhase.TERMINATING, m.RankPhase.KILLED)  # a rank in these phases may still report
WAS_STOPPED = {m.RankPhase.EXITING, m.RankPhase.TERMINATING, m.RankPhase.KILLED}


def make_observations(ranks, **more):
    """Make what the event loop passes to the diagnosis, from what it has seen of each rank."""
    seen = {}
    for rank, observed in ranks.items():
        world = {"world_size": len(ranks), "local_world_size": len(ranks), "role_world_size": len(ranks)}
        ids = {"rank": rank, "local_rank": rank, "role_rank": rank}
        worker = Worker(**ids, **world, run_id="test", master_addr="localhost", master_port=1)
        seen[rank] = RankObservations(worker, pid=100 + rank, **observed)
    return AttemptObservations(ranks=seen, hostname="here", run_started_at=0.0, **more)


class History(RuleBasedStateMachine):
    """Ranks do anything that the event loop could observe. The machine's actions are recorded."""

    @initialize(
        keep=st.booleans(),
        n=st.integers(2, 5),
        timeout=st.none() | st.floats(0.5, 30),
        limit=st.none() | st.just(LIMIT),
        stop_timeout=st.none() | st.floats(0.5, 30),
        ready=st.integers(0, 5),
        signals=st.integers(0, 2),
        exits=st.integers(0, 2),
    )
    def begin(self, *, keep, n, timeout, limit, stop_timeout, ready, signals, exits):
        self.now = 1.0
        self.are_limits_suspended, self.resumed_at = False, 0.0
        self.keep = keep
        self.limits = {"timeout": timeout, "heartbeat_timeout": limit}
        self.stop_timeout = stop_timeout
        self.state = WorkerState.INIT
        self.signals, self.exits = signals, exits  # how many may still come; without a limit most histories are soon over
        self.observed = {rank: {"was_ready": False} for rank in range(n)}
        self.begin_call()
        for rank in range(min(n, ready)):
            self.make_ready(rank)

    def begin_call(self):
        phases = {rank: m.RankPhase.READY if it["was_ready"] else m.RankPhase.STARTING for rank, it in self.observed.items()}
        timeout, limit = self.limits["timeout"], self.limits["heartbeat_timeout"]
        self.machine = CallMachine(
            phases,
            now=self.now,
            grace_period=GRACE,
            limits={} if timeout is None else {"timeout": self.now + timeout},
            start_deadline=self.now + START_TIMEOUT,
            heartbeat_timeout=limit,
            stop_timeout=self.stop_timeout,
            keep_ranks=self.keep,
            are_limits_suspended=self.are_limits_suspended,
        )
        self.verdict = None
        self.is_diagnosed = False
        self.actions = []
        self.observed = {rank: {"was_ready": it["was_ready"], "signals_sent": set()} for rank, it in self.observed.items()}
        self.has_answered = set()
        self.has_sent_details = set()
        self.heartbeats = dict.fromkeys(self.observed)
        self.asked_for_stacks = set()
        self.execute(self.machine.begin())
        self.check_state()

    @precondition(lambda self: self.machine.stage is m.CallStage.KEPT)
    @rule(timeout=st.none() | st.floats(0.5, 30))
    def call_again(self, timeout):
        assert self.keep
        assert set(self.machine.phase_table.phases.values()) == {m.RankPhase.READY}
        self.limits["timeout"] = timeout
        self.begin_call()

    @precondition(lambda self: self.keep)
    @rule()
    def shut_down(self):
        self.send(m.Shutdown())

    @rule()
    def suspend_or_resume_limits(self):
        self.are_limits_suspended = not self.are_limits_suspended
        self.send(m.SuspendLimits() if self.are_limits_suspended else m.ResumeLimits())
        self.resumed_at = self.now

    @rule(seconds=st.floats(0.001, 1000.0))
    def suspend_the_program(self, seconds):
        left = self.seconds_to_deadline()
        self.now += seconds
        self.resumed_at = self.now
        self.send(m.Resumed(self.now - seconds))
        assert self.machine.stage is m.CallStage.RUNNING or abs(self.seconds_to_deadline() - left) < 1e-6

    def seconds_to_deadline(self):
        return (self.machine.deadline if self.machine.deadline is not None else self.now) - self.now

    @rule()
    def find_a_mismatch(self):
        if self.machine.are_limits_active():
            self.verdict = CollectiveVerdict(
                VerdictKind.MISMATCH, (0,), "x", {0: "called something else"}, ("default", "gloo", ()), 1
            )
        self.send(m.CollectivesMismatched())

    @rule(signum=st.none() | st.sampled_from([signal.SIGINT, signal.SIGUSR1]), is_from_job=st.booleans())
    def request_stop(self, signum, is_from_job):
        was_running = self.machine.is_running()
        self.send(m.StopRequested("a reason", signum, is_from_job=is_from_job))
        assert not was_running or self.machine.stop_request is not None

    @rule()
    def abort(self):
        self.send(m.Abort())

    @rule()
    def cancel_by_another_node(self):
        self.send(m.CancelAttempt())

    def make_ready(self, rank):
        self.observed[rank]["was_ready"] = True
        self.send(m.Ready(rank))

    def send(self, event):
        self.execute(self.machine.handle(event, self.now))
        self.check_state()
        if self.machine.stage is m.CallStage.KEPT:
            self.diagnose()

    def execute(self, actions):
        self.actions += actions
        for action in actions:
            if isinstance(action, m.SendSignal):
                self.observed[action.rank]["signals_sent"].add(action.signum)
            elif isinstance(action, m.DumpStacks | m.RequestCollectives):
                self.asked_for_stacks.add(action.rank)
        for action in actions:
            if isinstance(action, m.ReadHeartbeat):
                self.send(m.HeartbeatRead(action.rank, beat_at=self.heartbeats[action.rank]))

    def check_state(self):
        """Check that the new state may follow the last one, as EventBus.change_state does."""
        before, self.state = self.state, self.machine.state
        if self.state is not before:
            check_transition(before, self.state)

    def ranks_in(self, *phases):
        return [rank for rank, phase in self.machine.phase_table.phases.items() if phase in phases]

    def ranks_that_may_report(self):
        return [
            rank for rank in self.ranks_in(*MAY_REPORT) if m.CallRank(rank) in self.actions and rank not in self.has_answered
        ]

    def answer(self, rank, kind, body):
        self.observed[rank]["answer"] = Message(kind, self.now, body)
        self.has_answered.add(rank)

    @precondition(lambda self: self.ranks_in(m.RankPhase.STARTING))
    @rule(data=st.data())
    def become_ready(self, data):
        self.make_ready(data.draw(st.sampled_from(self.ranks_in(m.RankPhase.STARTING))))

    @precondition(lambda self: self.ranks_that_may_report())
    @rule(data=st.data(), is_secondary=st.booleans(), announced=st.booleans())
    def raise_error(self, data, is_secondary, announced):
        rank = data.draw(st.sampled_from(self.ranks_that_may_report()))
        if announced:
            self.send(m.Failing(rank))
        self.answer(rank, MessageKind.RAISED, ENCODERS[is_secondary].plain())
        self.observed[rank]["details"] = ENCODERS[is_secondary].details()
        self.send(m.Failed(rank, is_secondary=is_secondary))

    @precondition(lambda self: self.ranks_that_may_send_details())
    @rule(data=st.data())
    def send_details(self, data):
        rank = data.draw(st.sampled_from(self.ranks_that_may_send_details()))
        self.has_sent_details.add(rank)
        self.send(m.DetailsReceived(rank))

    def ranks_that_may_send_details(self):
        failed = [rank for rank in self.has_answered - self.has_sent_details if "details" in self.observed[rank]]
        return sorted(set(failed) & set(self.ranks_in(m.RankPhase.FAILED, m.RankPhase.TERMINATING, m.RankPhase.KILLED)))

    @precondition(lambda self: self.ranks_that_may_report())
    @rule(data=st.data())
    def return_value(self, data):
        rank = data.draw(st.sampled_from(self.ranks_that_may_report()))
        self.answer(rank, MessageKind.RETURNED, RETURNED)
        self.send(m.Returned(rank))

    # after a call that keeps its ranks, an exit is no event of the call
    @precondition(lambda self: self.exits and not self.machine.is_over() and self.ranks_in(*m.ALIVE_PHASES - WAS_STOPPED))
    @rule(data=st.data(), code=EXIT_CODES)
    def exit_unasked(self, data, code):
        self.exits -= 1
        self.exit(data.draw(st.sampled_from(self.ranks_in(*m.ALIVE_PHASES - WAS_STOPPED))), code)

    @precondition(lambda self: self.ranks_in(*WAS_STOPPED))
    @rule(data=st.data())
    def exit_after_stop(self, data):
        self.exit(data.draw(st.sampled_from(self.ranks_in(*WAS_STOPPED))), -signal.SIGTERM)

    def exit(self, rank, code):
        self.observed[rank] |= {"died_at": self.now, "exit_code": code}
        self.send(m.Exited(rank))

    @precondition(lambda self: self.ranks_in(m.RankPhase.RUNNING))
    @rule(data=st.data())
    def send_heartbeat(self, data):
        self.heartbeats[data.draw(st.sampled_from(self.ranks_in(m.RankPhase.RUNNING)))] = self.now

    @precondition(lambda self: self.asked_for_stacks & set(self.ranks_in(*m.ALIVE_PHASES - {m.RankPhase.EXITING})))
    @rule(data=st.data())
    def dump_stacks(self, data):
        rank = data.draw(
            st.sampled_from(sorted(self.asked_for_stacks & set(self.ranks_in(*m.ALIVE_PHASES - {m.RankPhase.EXITING}))))
        )
        self.asked_for_stacks.remove(rank)
        self.send(m.StackDumped(rank))

    @precondition(lambda self: self.signals)
    @rule(signum=st.sampled_from([signal.SIGINT, signal.SIGTERM]))
    def signal_host(self, signum):
        self.signals -= 1
        self.send(m.Interrupted(signum))

    @rule(seconds=st.floats(0.001, 2.0))
    def let_time_pass(self, seconds):
        deadline = self.machine.deadline
        self.now = min(self.now + seconds, max(self.now, deadline if deadline is not None else self.now + seconds))
        self.execute(self.machine.handle_deadline(self.now))
        self.check_state()

    @rule()
    def reach_deadline(self):
        if self.machine.deadline is not None:
            self.now = max(self.now, self.machine.deadline)
            self.execute(self.machine.handle_deadline(self.now))
            self.check_state()

    @invariant()
    def every_wait_has_a_deadline(self):
        machine = getattr(self, "machine", None)
        if machine is None or machine.is_over():
            return
        if self.are_limits_suspended and machine.is_running():  # the user may take any time
            assert machine.deadline is None
            return
        if machine.stage is not m.CallStage.RUNNING:
            assert machine.deadline is not None
        elif machine.deadline is None:
            assert m.RankPhase.RUNNING in machine.phase_table.phases.values()
            assert m.RankPhase.STARTING not in machine.phase_table.phases.values()

    @invariant()
    def every_silence_is_noticed(self):
        machine = getattr(self, "machine", None)
        if machine is None or self.are_limits_suspended:
            return
        if machine.stage is m.CallStage.RUNNING and self.limits["heartbeat_timeout"] is not None:
            heartbeats = [
                max(beat, self.resumed_at)
                for rank, beat in self.heartbeats.items()
                if machine.phase_table.phases[rank] is m.RankPhase.RUNNING and beat is not None
            ]
            late = [beat for beat in heartbeats if self.now >= beat + LIMIT]
            assert not late or machine.deadline <= max(self.now, min(late) + LIMIT + m.CONFIRM_SECONDS)

    @invariant()
    def no_action_is_repeated(self):
        sent = getattr(self, "actions", [])
        # a rank that is asked to exit, and does not, is stopped; a stopped rank that then answers is asked to exit
        once = [
            action
            for action in sent
            if not isinstance(action, m.ReadHeartbeat | m.RequestExit) and getattr(action, "signum", 0) != signal.SIGCONT
        ]
        assert len(once) == len(set(once)), once
        assert all(sent.count(action) <= 2 for action in sent if isinstance(action, m.RequestExit))
        for rank in getattr(self, "observed", ()):
            stops = [
                action
                for action in once
                if action in (m.SendSignal(rank, signal.SIGINT), m.SendSignal(rank, signal.SIGTERM))
            ]
            assert len(stops) <= 1 + self.keep  # a rank that may stay after an interrupt gets SIGTERM if it does not answer

    @invariant()
    def no_stopped_rank_is_called(self):
        stopped = set()
        for action in getattr(self, "actions", []):
            if isinstance(action, m.SendSignal):
                stopped.add(action.rank)
            assert not (isinstance(action, m.CallRank) and action.rank in stopped)

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        self.send(m.ResumeLimits())
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
        """Check that no report is lost, and that no victim is the root cause while another failure before the stop is known.

        It is called once for each call. Events between two calls belong to no call.
        """
        if self.is_diagnosed:
            return
        self.is_diagnosed = True
        observed = make_observations(
            self.observed,
            stop_reason=self.machine.stop_reason,
            stopped_at=self.machine.stopped_at,
            silent_ranks=self.machine.heartbeats.silent_ranks,
            never_ready=self.machine.never_ready,
            signum=self.machine.signum,
            collective_verdict=self.verdict,
            passed_limit=self.machine.passed_limit,
            heartbeat_timeout=self.limits["heartbeat_timeout"],
        )
        result = diagnose(observed)
        stopped_at = self.machine.stopped_at if self.machine.stopped_at is not None else self.now
        reported_in_time = {
            rank for rank, it in self.observed.items() if "answer" in it and it["answer"].stamp <= stopped_at
        }
        raised_in_time = {rank for rank in reported_in_time if self.observed[rank]["answer"].body != RETURNED}
        assert raised_in_time <= set(result.failures)
        if result.state is WorkerState.SUCCEEDED:
            assert dict(result.return_values) == dict.fromkeys(self.observed, 7)
        elif self.machine.stop_reason is m.StopReason.FAILED:
            assert result.failures
            assert result.root_cause is not None
        primaries = [
            rank
            for rank, failure in result.failures.items()
            if not failure.is_secondary and self.ended_at(rank, stopped_at) <= stopped_at
        ]
        if primaries and result.root_cause is not None:
            assert not result.root_cause.is_secondary
        str(result)

    def ended_at(self, rank, default):
        """Return when the rank answered or died. The default is for a rank that has done neither."""
        it = self.observed[rank]
        return it["answer"].stamp if "answer" in it else it.get("died_at", default)


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=400, stateful_step_count=40)
