"""Which rank failed first, and which are its victims: the rules at the head of diagnose.py, on evidence made by hand."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores.diagnosis.evidence import (
    LATE_PEER,
    LOADS,
    LOST_PEER,
    STOPPED,
    STOPPED_AT,
    WAITS,
    WAITS_ELSEWHERE,
    answer,
    call,
    died,
    judge,
    observe,
    raised,
    returned,
    stack,
    stack_in_torch,
    stopped,
    waiting,
)
from mpwatch import FailureKind, WorkerState
from mpwatch.watcher.diagnosis.collective_verdict import find_verdict
from mpwatch.watcher.diagnosis.death_order import DeathClock
from mpwatch.watcher.machine.transitions import StopReason

TERM, CONT, KILL, SEGV = signal.SIGTERM, signal.SIGCONT, signal.SIGKILL, signal.SIGSEGV
LOST, CAUSE, LATE = raised(LOST_PEER), raised(ValueError("x")), raised(LATE_PEER)
FROM_LOST_PEER = RuntimeError("training failed")
FROM_LOST_PEER.__cause__ = LOST_PEER
MAY_WAIT = stopped(stack("step", 3, "handle.wait()"))
TIMED_OUT = {"stop_reason": StopReason.TIMED_OUT, "passed_limit": "timeout=10 s"}
INTERRUPTED = {"stop_reason": StopReason.INTERRUPTED, "signum": TERM}


def own_and_victims(result):
    own = {rank for rank, failure in result.failures.items() if not failure.is_secondary}
    return own, result.failures.keys() - own


TABLE = {
    # evidence of each rank: the root cause, the ranks that failed by themselves, their victims
    "the earliest failure": ([raised(KeyError(), 9.9), raised(ValueError(), 9.8), STOPPED], 1, {0, 1}, set()),
    "raised from a lost peer": ([raised(FROM_LOST_PEER, 1.0), died(-9)], 1, {1}, {0}),
    "nothing but lost peers": ([LOST, raised(LOST_PEER, 9.1)], 0, set(), {0, 1}),
    "a broken pipe and a later exception": ([raised(BrokenPipeError("broken")), raised(KeyError(), 9.2)], 1, {1}, {0}),
    "the words of a lost peer after a death": ([raised(ValueError("lost my peer")), died(-9, 9.05)], 1, {1}, {0}),
    # around the stop at STOPPED_AT
    "an exception after the stop": ([CAUSE, raised(KeyboardInterrupt(), 10.1), STOPPED], 0, {0}, set()),
    "the time of an exception is exact": ([LOST, raised(ValueError(), 10.05)], 0, set(), {0}),
    "a death noticed just after the stop": ([LOST, died(-SEGV, 10.09)], 1, {1}, {0}),
    "a death noticed later": ([LOST, died(-SEGV, 10.11)], 0, {1}, {0}),
    "killed by another during the stop": ([CAUSE, died(-KILL, 10.2, [TERM])], 0, {0, 1}, set()),
    "killed by the watcher": ([CAUSE, died(-KILL, 15.0, [TERM, CONT, KILL])], 0, {0}, set()),
    "killed after it had returned": ([returned(died_at=5.0, exit_code=-9), raised(LOST_PEER, 6.0)], 0, {0}, {1}),
    # ranks that kept others waiting
    "the rank that is not in the collective": ([LATE, WAITS, LOADS], 2, {2}, {0}),
    "a suspended rank": ([LATE, stopped(process_state="T")], 1, {1}, {0}),
    "a cause beside a late rank": ([LATE, LOADS, raised(ValueError(), 9.5)], 2, {2}, {0}),
    "all wait": ([LATE, WAITS], 0, set(), {0}),
    "it may wait: a handle": ([LATE, MAY_WAIT], 0, set(), {0}),
    "no stacks": ([LATE, STOPPED], 0, set(), {0}),
    "it has returned": ([LATE, returned()], 0, set(), {0}),
}


@pytest.mark.parametrize(("ranks", "root", "own", "victims"), TABLE.values(), ids=TABLE)
def test_who_is_blamed(ranks, root, own, victims):
    result = judge(*ranks)
    assert (result.root_cause.rank, own_and_victims(result)) == (root, (own, victims))


BEFORE_STOP = st.floats(0, STOPPED_AT)
OWN = st.lists(st.tuples(st.booleans(), BEFORE_STOP), min_size=1, max_size=3)


@given(st.lists(BEFORE_STOP, min_size=1, max_size=3), OWN)
def test_the_earliest_own_failure_is_the_cause_whenever_peers_are_lost(lost, own):
    """A peer often fails before the failure that caused it is noticed."""
    victims = [raised(LATE_PEER if number else LOST_PEER, at) for number, at in enumerate(lost)]
    result = judge(*victims, *(died(7, at) if dies else raised(ValueError(), at) for dies, at in own))
    assert own_and_victims(result) == (set(range(len(lost), len(lost) + len(own))), set(range(len(lost))))
    assert result.root_cause.elapsed == min(at for _, at in own)


# --- ranks that send no heartbeats


IN_BACKWARD = stopped(stack_in_torch("_engine_run_backward", "autograd/graph.py", "run()"))
WRITES_A_CHECKPOINT = stopped(stack_in_torch("_write_item", "distributed/checkpoint/filesystem.py", "run()"))
WAITS_IN_A_THREAD = stopped(f"{stack('step', 3, 'future.result()')}\n\n{stack_in_torch()}")

SILENCE = {
    # evidence of each rank, ranks without heartbeats: the ranks that are blamed, their victims
    "the one outside of the collective": ([WAITS, LOADS, WAITS], {0, 1, 2}, {1}, {0, 2}),
    "suspended": ([WAITS, stopped(process_state="T")], {0, 1}, {1}, {0}),
    "in another collective than the majority": ([WAITS, WAITS, WAITS_ELSEWHERE, STOPPED], {0, 1, 2}, {2}, {0, 1}),
    "no majority": ([WAITS, WAITS_ELSEWHERE], {0, 1}, {0, 1}, set()),
    "of two outside the silent one": ([WAITS, LOADS, LOADS], {0, 2}, {2}, {0}),
    "not certain": ([WAITS, MAY_WAIT], {0, 1}, {0, 1}, set()),
    "the other has returned": ([WAITS, returned()], {0}, {0}, set()),
    "waits for gradients": ([IN_BACKWARD, LOADS, IN_BACKWARD], {0, 1, 2}, {1}, {0, 2}),
    "writes a checkpoint": ([WAITS, WRITES_A_CHECKPOINT], {0, 1}, {1}, {0}),
    "a thread of it waits": ([WAITS_IN_A_THREAD, LOADS], {0, 1}, {1}, {0}),
}


@pytest.mark.parametrize(("ranks", "silent", "blamed", "victims"), SILENCE.values(), ids=SILENCE)
def test_the_rank_that_kept_the_others_silent_is_blamed(ranks, silent, blamed, victims):
    result = judge(*ranks, silent_ranks={rank: 4.0 + rank / 10 for rank in silent}, heartbeat_timeout=5.0)
    assert own_and_victims(result) == (blamed, victims)
    assert {failure.kind for failure in result.failures.values()} == {FailureKind.HANG}
    assert result.root_cause.rank == min(blamed)


# --- collectives


def with_calls(rank, what, *calls):
    return {**what, "collectives": answer(rank, *calls)}


FIRST, SECOND = call("barrier", 1), call("barrier", 2)


@pytest.mark.parametrize(
    ("first", "second", "root", "kind"),
    [
        (LATE, STOPPED, 1, FailureKind.HANG),
        (LOST, STOPPED, None, None),  # a late rank keeps its connections: another process may have broken this one
        (LOST, returned(), 1, FailureKind.MISMATCH),
    ],
)
def test_a_rank_that_has_not_joined_is_blamed_for_timeouts_and_one_that_has_returned_for_all(first, second, root, kind):
    result = judge(with_calls(0, first, FIRST, SECOND), with_calls(1, second, FIRST), with_calls(2, LOST, FIRST, SECOND))
    assert own_and_victims(result) == ({1} if kind else set(), {0, 2})
    assert kind is None or (result.root_cause.rank, result.root_cause.kind) == (root, kind)


def test_a_collective_that_has_failed_is_not_completed():
    result = judge(with_calls(0, LOST, FIRST, SECOND), with_calls(1, returned(), FIRST))
    assert result.collectives[0].state.name == "WAITING"
    assert result.failures[0].collective == result.collectives[0]


def test_the_verdict_that_has_ended_the_attempt_stays():
    """The odd rank does not answer at the end, or has an attempt of its own, with scope="worker"."""
    calls = [waiting("barrier", 2), waiting("barrier", 2), waiting("broadcast", 2)]
    verdict = find_verdict({rank: answer(rank, each) for rank, each in enumerate(calls)})
    for number in (1, 3):
        ranks = [with_calls(rank, STOPPED, each) for rank, each in enumerate(calls[:number])]
        result = judge(*ranks, collective_verdict=verdict)
        assert (result.reason, result.failures.keys()) == (verdict.sentence, {2} & set(range(number)))


@pytest.mark.parametrize(("seconds", "is_named"), [(1.0, False), (60.0, True)])
def test_an_interrupted_run_names_the_rank_for_which_others_have_waited_long(seconds, is_named):
    result = judge(with_calls(0, {}, waiting("barrier", 1, ranks=(0, 1), seconds=seconds)), with_calls(1, {}), **INTERRUPTED)
    assert ("; rank 1 has not joined barrier #1 (default group), in which rank 0 waits" in result.reason) is is_named
    assert result.failures == {}


# --- timeouts and interrupts


def test_a_timeout_blames_no_rank():
    """In a healthy run, too, ranks reach a collective at different times."""
    on_its_way, in_time = returned(answer_received_at=10.5), returned(answer_received_at=9.0)
    result = judge(WAITS, LOADS, WAITS, on_its_way, in_time, **TIMED_OUT)
    assert {rank: failure.kind for rank, failure in result.failures.items()} == dict.fromkeys(range(4), FailureKind.TIMEOUT)
    assert result.root_cause is None
    assert result.reason == (
        "the run did not end within timeout=10 s: ranks 0-3 had not returned, "
        "and rank 1 not in the collective that others waited in"
    )


@pytest.mark.parametrize("reason", [StopReason.INTERRUPTED, StopReason.CANCELLED_BY_JOB])
def test_a_rank_that_ends_by_a_signal_to_all_processes_has_not_failed_but_one_that_crashes_has(reason):
    """A scheduler sends SIGTERM to all processes, so a rank may end before the watcher has sent it a signal."""
    states = judge(died(-TERM, 10.1), died(-SEGV, 10.1), returned(), stop_reason=reason, signum=TERM).worker_states
    assert list(states.values()) == [WorkerState.STOPPED, WorkerState.FAILED, WorkerState.SUCCEEDED]
    result = judge(STOPPED, returned(), stop_reason=reason, signum=TERM)
    assert (result.state, result.verdict) == (WorkerState.STOPPED, "the run was stopped: this process received SIGTERM")


# --- kinds of failures


EXCEPTION = FailureKind.EXCEPTION


@pytest.mark.parametrize(
    ("what", "kind", "exit_code", "text"),
    [
        (died(-40), FailureKind.SIGNAL, 168, "rank 0 was killed by signal 40"),
        (died(-9, oom_proof="proof"), FailureKind.OOM, 137, "was killed by the kernel's out-of-memory killer (proof)"),
        (raised(ValueError("x" * 600)), EXCEPTION, 1, "rank 0 failed first: ValueError: " + "x" * 488 + " …"),
        ({**raised(ValueError("x")), "details": b"garbage"}, EXCEPTION, 1, "rank 0 failed first: ValueError: x"),
        (died(-9, 20.0, [TERM, KILL], raised_at=9.0), EXCEPTION, 1, "did not end in time"),
    ],
)
def test_the_kind_the_exit_code_and_the_verdict(what, kind, exit_code, text):
    result = judge(what)
    assert (result.root_cause.kind, result.root_cause.exit_code) == (kind, exit_code)
    assert text in result.verdict


@pytest.mark.parametrize(("code", "status"), [(3, 3), (256, 1), (300, 44), (-1, 255), ("cannot go on", 1), ([], 1)])
def test_an_exit_that_is_no_success_has_no_status_of_success(code, status):
    """The shell shows the last eight bits of a status."""
    result = judge(raised(SystemExit(code)))
    assert (result.root_cause.kind, result.root_cause.exit_code) == (FailureKind.EXIT, status)
    assert result.verdict == f"rank 0 ended with exit code {status} and no result (SystemExit: {code})"


# --- the time of a death


def test_a_death_is_between_the_messages_read_before_and_after_it():
    """The kernel reports a death late, and the selector returns descriptors in the order in which they became ready."""
    (first, second), clock = observe({}, {}).ranks.values(), DeathClock()
    clock.record_message(3.0)
    clock.record_dying(first)
    clock.record_message(5.0)
    clock.record_death(second)
    clock.record_message(4.0)  # arrives late
    assert 3.0 <= first.died_at < 4.0
    assert second.died_at == 5.0


def test_the_death_of_a_rank_is_not_before_the_first_signal_to_it():
    (victim,), clock = observe({"first_signal_at": 4.0}).ranks.values(), DeathClock()
    clock.record_death(victim)
    clock.record_message(3.0)
    assert victim.died_at == 4.0
