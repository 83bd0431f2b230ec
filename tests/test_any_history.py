"""Any order of events, tried by Hypothesis: the machine, fed as the loop feeds it, and the diagnosis of what was seen."""

import signal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from told import COMPLAINT, observations, raised, returned

from mpwatch import WorkerState
from mpwatch.results.state_transitions import check_change
from mpwatch.watcher.diagnosis.diagnose import diagnose
from mpwatch.watcher.machine.state_machine import StateMachine
from mpwatch.watcher.machine.transitions import (
    LIVING,
    SURE_SECONDS,
    AbandonRank,
    Abort,
    CallRank,
    DetailsReceived,
    DoNotRestart,
    DumpStacks,
    Exited,
    Failed,
    Failing,
    HeartbeatRead,
    Interrupted,
    RankPhase,
    ReadHeartbeat,
    Ready,
    RequestExit,
    Restart,
    Returned,
    RunStage,
    SendSignal,
    Shutdown,
    StackDumped,
    StartCall,
    StartRank,
    StopReason,
)
from mpwatch.wire.messages import Message

GRACE = 3.0
PATIENCE = 30.0
LIMIT = 5.0
TOLD = {False: raised(ValueError("the batch is bad"), 0.0), True: raised(COMPLAINT, 0.0)}
RETURNED = returned(7)
for told in (*TOLD.values(), RETURNED):  # none of them has died
    del told["died_at"], told["exit_code"]
DEATHS = st.sampled_from([-signal.SIGKILL, -signal.SIGSEGV, 0, 3])
MUTE = (RankPhase.RUNNING, RankPhase.TERMINATING, RankPhase.KILLED)  # may have something to say yet
TOLD_TO_END = {RankPhase.EXITING, RankPhase.TERMINATING, RankPhase.KILLED}


class History(RuleBasedStateMachine):
    """Ranks do what they like; the watcher sees it, and does what the machine says."""

    @initialize(
        may_restart=st.booleans(),
        keep=st.booleans(),
        n=st.integers(2, 5),
        timeout=st.none() | st.floats(0.5, 30),
        limit=st.none() | st.just(LIMIT),
        ready=st.integers(0, 5),
        signals=st.integers(0, 2),
        deaths=st.integers(0, 2),
    )
    def begin(self, *, may_restart, keep, n, timeout, limit, ready, signals, deaths):
        self.now = 1.0
        self.keep = keep
        self.limits = {"timeout": timeout, "heartbeat_timeout": limit}
        more = {
            "grace_period": GRACE,
            "start_timeout": PATIENCE,
            "keep": keep,
            "judged": (StopReason.FAILED,) if may_restart else (),
        }
        self.machine = StateMachine(range(n), now=self.now, **more, heartbeat_timeout=limit)
        self.state = WorkerState.INIT
        self.have_others_failed = False
        self.restarts = 3
        self.signals, self.deaths = signals, deaths  # that may still come: else most histories are soon over
        self.be_born(n)
        self.tell(StartCall(self.now, timeout))
        self.some_become_ready(ready)

    def be_born(self, n):
        self.seen = {rank: {"was_ready": False} for rank in range(n)}
        self.begin_a_call()

    def some_become_ready(self, number):
        for rank in sorted(self.seen)[:number]:
            self.ready(rank)

    def begin_a_call(self):
        self.is_judged = False
        self.sent = []
        self.seen = {rank: {"was_ready": it["was_ready"], "signals_sent": set()} for rank, it in self.seen.items()}
        self.has_answered = set()
        self.has_told = set()
        self.heartbeats = dict.fromkeys(self.seen)
        self.looked_at = set()

    @precondition(lambda self: self.machine.stage is RunStage.IDLE)
    @rule(timeout=st.none() | st.floats(0.5, 30))
    def is_called_again(self, timeout):
        assert self.keep
        assert set(self.machine.phase_table.phases.values()) == {RankPhase.READY}
        self.limits["timeout"] = timeout
        self.begin_a_call()
        self.tell(StartCall(self.now, timeout))

    @precondition(lambda self: self.keep)
    @rule()
    def is_told_to_end(self):
        self.tell(Shutdown())

    @precondition(lambda self: self.machine.stage is RunStage.AWAITING_DECISION)
    @rule(deaths=st.integers(0, 2))
    def is_worth_another_try(self, deaths):
        assert set(self.machine.phase_table.phases.values()) == {RankPhase.EXITED}
        assert self.machine.signum is None
        self.judge()
        self.deaths = deaths
        self.restarts -= 1
        event = Restart(0, generation=self.machine.generation) if self.restarts else self.of_now(DoNotRestart, 0)
        self.tell(event)
        assert self.machine.stage is (
            RunStage.RUNNING if self.restarts and not self.have_others_failed else RunStage.FINISHED
        )

    @rule()
    def other_ranks_have_failed(self):
        self.have_others_failed = True
        self.tell(Abort())

    @precondition(lambda self: self.machine.generation)
    @rule(data=st.data(), kind=st.sampled_from([Ready, Returned, Failing, Failed, StackDumped, HeartbeatRead, Exited]))
    def something_comes_of_an_earlier_life(self, data, kind):
        rank = data.draw(st.sampled_from(sorted(self.seen)))
        before = dict(self.machine.phase_table.phases), self.machine.stage, self.machine.deadline
        assert self.machine.handle(kind(rank, generation=self.machine.generation - 1), self.now) == []
        assert (dict(self.machine.phase_table.phases), self.machine.stage, self.machine.deadline) == before

    def ready(self, rank):
        self.seen[rank]["was_ready"] = True
        self.tell(self.of_now(Ready, rank))

    def of_now(self, kind, rank, **more):
        return kind(rank, generation=self.machine.generation, **more)

    def tell(self, event):
        self.do(self.machine.handle(event, self.now))
        self.look_at_state()
        if self.machine.stage is RunStage.IDLE:
            self.judge()

    def do(self, actions):
        if any(isinstance(action, StartRank) for action in actions):
            assert actions == [StartRank(rank) for rank in self.seen]
            self.be_born(len(self.seen))
        self.sent += actions
        for action in actions:
            if isinstance(action, SendSignal):
                self.seen[action.rank]["signals_sent"].add(action.signum)
            elif isinstance(action, DumpStacks):
                self.looked_at.add(action.rank)
        for action in actions:
            if isinstance(action, ReadHeartbeat):
                self.tell(self.of_now(HeartbeatRead, action.rank, beat_at=self.heartbeats[action.rank]))

    def look_at_state(self):
        """As the group that these ranks are would tell it."""
        before, self.state = self.state, self.machine.state
        if self.state is not before:
            check_change(before, self.state)

    def those_in(self, *phases):
        return [rank for rank, phase in self.machine.phase_table.phases.items() if phase in phases]

    def those_who_may_speak(self):
        return [rank for rank in self.those_in(*MUTE) if CallRank(rank) in self.sent and rank not in self.has_answered]

    def report(self, rank, told):
        message = told["report"]
        self.seen[rank] |= {**told, "report": Message(message.kind, self.now, message.body)}
        self.has_answered.add(rank)

    @precondition(lambda self: self.those_in(RankPhase.STARTING))
    @rule(data=st.data())
    def becomes_ready(self, data):
        self.ready(data.draw(st.sampled_from(self.those_in(RankPhase.STARTING))))

    @precondition(lambda self: self.those_who_may_speak())
    @rule(data=st.data(), is_secondary=st.booleans(), announced=st.booleans())
    def raises(self, data, is_secondary, announced):
        rank = data.draw(st.sampled_from(self.those_who_may_speak()))
        if announced:
            self.tell(self.of_now(Failing, rank))
        self.report(rank, TOLD[is_secondary])
        self.tell(self.of_now(Failed, rank, is_secondary=is_secondary))

    @precondition(lambda self: self.those_who_may_tell())
    @rule(data=st.data())
    def tells_all(self, data):
        rank = data.draw(st.sampled_from(self.those_who_may_tell()))
        self.has_told.add(rank)
        self.tell(self.of_now(DetailsReceived, rank))

    def those_who_may_tell(self):
        broken = [rank for rank in self.has_answered - self.has_told if "details" in self.seen[rank]]
        return sorted(set(broken) & set(self.those_in(RankPhase.FAILED, RankPhase.TERMINATING, RankPhase.KILLED)))

    @precondition(lambda self: self.those_who_may_speak())
    @rule(data=st.data())
    def returns(self, data):
        rank = data.draw(st.sampled_from(self.those_who_may_speak()))
        self.report(rank, RETURNED)
        self.tell(self.of_now(Returned, rank))

    @precondition(lambda self: self.deaths and self.those_in(*LIVING - TOLD_TO_END))
    @rule(data=st.data(), code=DEATHS)
    def dies(self, data, code):
        self.deaths -= 1
        self.die(data.draw(st.sampled_from(self.those_in(*LIVING - TOLD_TO_END))), code)

    @precondition(lambda self: self.those_in(*TOLD_TO_END))
    @rule(data=st.data())
    def obeys(self, data):
        self.die(data.draw(st.sampled_from(self.those_in(*TOLD_TO_END))), -signal.SIGTERM)

    def die(self, rank, code):
        self.seen[rank] |= {"died_at": self.now, "exit_code": code}
        self.tell(self.of_now(Exited, rank))

    @precondition(lambda self: self.those_in(RankPhase.RUNNING))
    @rule(data=st.data())
    def beats_once(self, data):
        self.heartbeats[data.draw(st.sampled_from(self.those_in(RankPhase.RUNNING)))] = self.now

    @precondition(lambda self: self.looked_at & set(self.those_in(*LIVING - {RankPhase.EXITING})))
    @rule(data=st.data())
    def has_been_looked_at(self, data):
        rank = data.draw(st.sampled_from(sorted(self.looked_at & set(self.those_in(*LIVING - {RankPhase.EXITING})))))
        self.looked_at.remove(rank)
        self.tell(self.of_now(StackDumped, rank))

    @precondition(lambda self: self.signals)
    @rule(signum=st.sampled_from([signal.SIGINT, signal.SIGTERM]))
    def host_is_signalled(self, signum):
        self.signals -= 1
        self.tell(Interrupted(signum))

    @rule(seconds=st.floats(0.001, 2.0))
    def time_passes(self, seconds):
        deadline = self.machine.deadline
        self.now = min(self.now + seconds, max(self.now, deadline if deadline is not None else self.now + seconds))
        self.do(self.machine.expire(self.now))
        self.look_at_state()

    @rule()
    def time_is_up(self):
        if self.machine.deadline is not None:
            self.now = max(self.now, self.machine.deadline)
            self.do(self.machine.expire(self.now))
            self.look_at_state()

    @invariant()
    def nobody_is_waited_for_without_a_deadline(self):
        machine = getattr(self, "machine", None)
        if machine is None or machine.stage is RunStage.FINISHED:
            return
        if machine.stage not in (RunStage.RUNNING, RunStage.IDLE, RunStage.AWAITING_DECISION):
            assert machine.deadline is not None
        elif machine.deadline is None:
            assert (
                machine.stage in (RunStage.IDLE, RunStage.AWAITING_DECISION)
                or RankPhase.RUNNING in machine.phase_table.phases.values()
            )
            assert RankPhase.STARTING not in machine.phase_table.phases.values()

    @invariant()
    def no_silence_goes_unnoticed(self):
        machine = getattr(self, "machine", None)
        if machine is not None and machine.stage is RunStage.RUNNING and self.limits["heartbeat_timeout"] is not None:
            heartbeats = [
                beat
                for rank, beat in self.heartbeats.items()
                if machine.phase_table.phases[rank] is RankPhase.RUNNING and beat is not None
            ]
            late = [beat for beat in heartbeats if self.now >= beat + LIMIT]
            assert not late or machine.deadline <= max(self.now, min(late) + LIMIT + SURE_SECONDS)

    @invariant()
    def nothing_is_done_twice(self):
        sent = getattr(self, "sent", [])
        # a rank that is told to end, and does not, is stopped; one that was stopped and then answers is told to end
        goes_on = SendSignal, signal.SIGCONT  # which comes with every other one
        once = [
            a
            for a in sent
            if not isinstance(a, ReadHeartbeat | RequestExit) and (type(a), getattr(a, "signum", 0)) != goes_on
        ]
        assert len(once) == len(set(once)), once
        assert all(sent.count(action) <= 2 for action in sent if isinstance(action, RequestExit))
        for rank in getattr(self, "seen", ()):
            soft = [
                a
                for a in once
                if isinstance(a, SendSignal) and a.rank == rank and a.signum in (signal.SIGINT, signal.SIGTERM)
            ]
            assert len(soft) <= 1 + self.keep  # whoever might have stayed after an interrupt, and does not answer

    @invariant()
    def nobody_is_called_who_is_to_be_stopped(self):
        stopped = set()
        for action in getattr(self, "sent", []):
            if isinstance(action, SendSignal):
                stopped.add(action.rank)
            assert not (isinstance(action, CallRank) and action.rank in stopped)

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        for patience in range(10):  # nobody does anything any more
            if patience == 5 and self.machine.stage is RunStage.RUNNING:  # but for ranks at work, for ever
                self.tell(Interrupted(signal.SIGINT))
            if self.machine.stage is RunStage.IDLE:
                self.tell(Shutdown())
            if self.machine.stage is RunStage.AWAITING_DECISION:
                self.tell(self.of_now(DoNotRestart, 0))
            self.time_is_up()
        assert self.machine.stage is RunStage.FINISHED
        assert set(self.machine.phase_table.phases.values()) <= {RankPhase.EXITED, RankPhase.ABANDONED}
        assert self.machine.verdict is not None
        assert sum(isinstance(action, AbandonRank) for action in self.sent) <= len(self.seen)
        self.judge()

    def judge(self):
        """No report is lost, and no victim is the cause while a primary is known. What comes between two calls is of none."""
        if self.is_judged:
            return
        self.is_judged = True
        seen = observations(
            *self.seen.values(),
            verdict=self.machine.verdict,
            stopped_at=self.machine.stopped_at,
            silent=self.machine.heartbeats.silent,
            never_ready=self.machine.never_ready,
            signum=self.machine.signum,
            **self.limits,
        )
        result = diagnose(seen)
        stopped_at = self.machine.stopped_at if self.machine.stopped_at is not None else self.now
        early = {rank for rank, it in self.seen.items() if "report" in it and it["report"].stamp <= stopped_at}
        raised_early = {rank for rank in early if self.seen[rank]["report"].body != RETURNED["report"].body}
        assert raised_early <= set(result.failures)
        if result.state is WorkerState.SUCCEEDED:
            assert dict(result.return_values) == dict.fromkeys(self.seen, 7)
        elif self.machine.verdict is StopReason.FAILED:
            assert result.failures
            assert result.root_cause is not None
        primaries = [failure for failure in result.failures.values() if not failure.is_secondary]
        if primaries and result.root_cause is not None:
            assert not result.root_cause.is_secondary
        str(result)


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
