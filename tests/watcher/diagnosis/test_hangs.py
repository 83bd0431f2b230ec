"""Ranks that send no heartbeat, or keep the others waiting in a collective: heartbeats, reports, and the root cause."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

import mpwatch
from mpwatch import FailureKind
from mpwatch.results.report import format_report
from mpwatch.watcher.diagnosis.diagnose import diagnose
from mpwatch.watcher.machine.transitions import StopReason
from mpwatch.watcher.restarts.merge_results import merge_results
from mpwatch.wire.shared_memory import (
    HEARTBEAT_AT,
    HEARTBEAT_SIZE,
    MAX_REPORT_SIZE,
    SLOT_SIZE,
    HeartbeatSample,
    HeartbeatWriter,
    open_slot,
    read_heartbeat,
)
from support import failing
from support.observations import (
    CONNECTION_LOST_ERROR,
    IN_TORCH,
    LIBRARY,
    PEER_TIMEOUT_ERROR,
    STOPPED_RANK,
    make_observations,
    rank_that_raised,
    rank_that_returned,
    stack_in,
)
from support.process_state import SPAWN
from support.programs import ENV
from watcher.diagnosis import heartbeat_functions


def test_a_rank_that_kept_its_peers_waiting_is_the_cause():
    here, waiting = (
        {**STOPPED_RANK, "stacks": stack_in("load", 12, "sleep(60)")},
        {**STOPPED_RANK, "stacks": f"{IN_TORCH}\n    work.wait()"},
    )
    result = diagnose(make_observations(rank_that_raised(PEER_TIMEOUT_ERROR, 9.0), waiting, here))
    assert (result.root_cause.rank, result.root_cause.kind, set(result.failures)) == (2, FailureKind.HANG, {0, 2})
    assert result.root_cause.stack == stack_in("load", 12, "sleep(60)")
    text = "rank 2 kept its peers waiting until they timed out: still at work (train.py:12 in load: sleep(60))"
    assert format_report(result).startswith(text)
    assert (
        diagnose(
            make_observations(rank_that_raised(PEER_TIMEOUT_ERROR, 9.0), here, rank_that_raised(CONNECTION_LOST_ERROR, 9.1))
        ).root_cause.rank
        == 1
    )
    suspended = {**STOPPED_RANK, "process_state": "T"}
    assert (
        diagnose(make_observations(rank_that_raised(PEER_TIMEOUT_ERROR, 9.0), suspended)).root_cause.kind is FailureKind.HANG
    )


def test_a_rank_that_may_be_waiting_or_has_no_stacks_is_not_blamed():
    waiting = [
        f"{IN_TORCH}\n    work.wait()",
        stack_in("step", 3, "handle.wait()"),
        stack_in("step", 3, "loss.item()"),
        stack_in("step", 3),
    ]
    for other in (*({**STOPPED_RANK, "stacks": stacks} for stacks in waiting), STOPPED_RANK, rank_that_returned()):
        result = diagnose(make_observations(rank_that_raised(PEER_TIMEOUT_ERROR, 9.0), other))
        assert (result.root_cause.rank, result.root_cause.is_secondary) == (0, True)
    here = {**STOPPED_RANK, "stacks": stack_in("load", 12, "sleep(60)")}
    assert (
        diagnose(
            make_observations(rank_that_raised(PEER_TIMEOUT_ERROR, 9.0), here, rank_that_raised(ValueError("x"), 9.5))
        ).root_cause.rank
        == 2
    )


WAITS = {**STOPPED_RANK, "stacks": f"{IN_TORCH}\n    work.wait()"}
MAY_WAIT = {**STOPPED_RANK, "stacks": stack_in("step", 3, "handle.wait()")}
WAITS_ELSEWHERE = {**STOPPED_RANK, "stacks": f"{IN_TORCH.replace('all_reduce', 'barrier')}\n    work.wait()"}
LOADS = {**STOPPED_RANK, "stacks": stack_in("load", 12, "sleep(60)")}
UNSEEN = STOPPED_RANK
TORCH = f"{LIBRARY}/torch"
USER = '  File "/home/me/train.py", line 3 in step\n    step()'


def inside(file, function, line="run()"):
    """In this function of torch, called by the user's."""
    return {
        **STOPPED_RANK,
        "stacks": f'Thread 0x1 (most recent call first):\n  File "{file}", line 9 in {function}\n    {line}\n{USER}',
    }


IN_BACKWARD = inside(f"{TORCH}/autograd/graph.py", "_engine_run_backward")
IN_BUFFERS = inside(f"{TORCH}/nn/parallel/distributed.py", "_distributed_broadcast_coalesced")
FUNCTIONAL = {
    **STOPPED_RANK,
    "stacks": IN_TORCH.replace("\n", f'\n  File "{TORCH}/_ops.py", line 9 in __call__\n    self._op()\n', 1),
}
SENDS, RECEIVES = (inside(f"{TORCH}/distributed/distributed_c10d.py", name) for name in ("send", "recv"))
WRITES = inside(f"{TORCH}/distributed/checkpoint/filesystem.py", "_write_item")
WAITS_IN_A_THREAD = {**STOPPED_RANK, "stacks": f"{stack_in('step', 3, 'future.result()')}\n\n{IN_TORCH}"}


def silent(*ranks, beats, **more):
    return diagnose(make_observations(*ranks, silent_ranks=beats, heartbeat_timeout=5.0, **more))


@pytest.mark.parametrize(
    ("ranks", "beats", "blamed", "victims"),
    [
        ([WAITS, LOADS, WAITS], {0: 4.0, 1: 4.5, 2: 4.2}, {1}, {0, 2}),  # the one that is not in the collective
        ([WAITS, {**STOPPED_RANK, "process_state": "T"}], {0: 4.0, 1: 4.5}, {1}, {0}),
        ([WAITS, WAITS, WAITS_ELSEWHERE], {0: 4.0, 1: 4.5, 2: 5.0}, {2}, {0, 1}),  # it is in another one than the majority
        ([WAITS, LOADS], {0: 4.0}, {1}, {0}),  # even if it sent heartbeats all the time, or never
        ([WAITS, LOADS, LOADS], {0: 4.0, 2: 4.0}, {2}, {0}),  # of two outside, the silent one
        ([WAITS, WAITS_ELSEWHERE], {0: 4.0, 1: 4.5}, {0, 1}, set()),  # no majority
        ([WAITS, MAY_WAIT, LOADS], {0: 4.0, 1: 4.5}, {2}, {0, 1}),
        ([WAITS, MAY_WAIT], {0: 4.0, 1: 4.5}, {0, 1}, set()),  # not certain
        ([WAITS, UNSEEN], {0: 4.0}, {0}, set()),
        ([WAITS, WAITS, WAITS_ELSEWHERE, UNSEEN], {0: 4.0, 1: 4.0, 2: 4.0}, {2}, {0, 1}),
        ([WAITS, {**STOPPED_RANK, "process_state": "D"}], {0: 4.0, 1: 4.5}, {1}, {0}),
        ([WAITS, {**STOPPED_RANK, "process_state": "t"}], {0: 4.0, 1: 4.5}, {1}, {0}),
        ([IN_BACKWARD, LOADS, IN_BACKWARD], {0: 4.0, 1: 4.5, 2: 4.2}, {1}, {0, 2}),  # DistributedDataParallel
        ([IN_BUFFERS, LOADS], {0: 4.0, 1: 4.5}, {1}, {0}),
        ([FUNCTIONAL, LOADS], {0: 4.0, 1: 4.5}, {1}, {0}),
        ([SENDS, RECEIVES, RECEIVES], {0: 4.0, 1: 4.0, 2: 4.0}, {0, 1, 2}, set()),  # one sends, and most receive
        ([WAITS, WRITES], {0: 4.0, 1: 4.5}, {1}, {0}),  # a checkpoint
        ([WAITS_IN_A_THREAD, LOADS], {0: 4.0, 1: 4.5}, {1}, {0}),
        (
            [WAITS, WAITS_ELSEWHERE, LOADS],
            {0: 4.0, 1: 4.5},
            {0, 1},
            set(),
        ),  # rank 2 sends heartbeats, and the silent ranks are in different collectives
        ([LOADS, LOADS], {1: 4.0}, {1}, set()),  # no rank waits
        ([WAITS, rank_that_returned()], {0: 4.0}, {0}, set()),
    ],
)
def test_the_rank_outside_of_the_collective_is_blamed(ranks, beats, blamed, victims):
    result = silent(*ranks, beats=beats)
    assert {rank for rank, failure in result.failures.items() if not failure.is_secondary} == blamed
    assert {rank for rank, failure in result.failures.items() if failure.is_secondary} == victims
    assert {failure.kind for failure in result.failures.values()} == {FailureKind.HANG}
    assert result.root_cause.rank in blamed


def test_a_silent_rank_is_reported_with_its_last_step():
    there = {**LOADS, "heartbeat": HeartbeatSample(4.5, (4.5, 120, 500, {"loss": 0.5}))}
    result = silent(WAITS, there, beats={0: 4.0, 1: 4.5})
    assert format_report(result).splitlines() == [
        "rank 1 was silent for 5.5 s (heartbeat_timeout=5), at step 120 of 500: still at work (train.py:12 in load: sleep(60))",
        "  rank 0: a victim of rank 1: waited (c10d.py:3 in all_reduce: work.wait()), silent for 6.0 s",
    ]
    assert result.progress[1] == mpwatch.Progress(step=120, total=500, metrics={"loss": 0.5}, elapsed=4.5)
    assert (result.root_cause.elapsed, result.root_cause.stack) == (4.5, LOADS["stacks"])


def test_the_victims_of_a_silent_rank_share_a_line():
    waits = {**WAITS, "stacks": f"{IN_TORCH}\n{stack_in('train', 21).partition(chr(10))[2]}"}
    waits["heartbeat"] = HeartbeatSample(4.0, (4.0, 7, 20, {}))
    result = silent(waits, waits, LOADS, waits, beats={0: 4.0, 1: 4.1, 2: 4.0, 3: 4.2})
    line = "ranks 0-1, 3: victims of rank 2: waited in all_reduce (train.py:21 in train), silent for 6.0 s at step 7 of 20"
    assert format_report(result).splitlines()[1:] == [f"  {line}"]
    assert str(result.failures[0]) == line.replace("ranks 0-1, 3: victims of rank 2", "rank 0")


def test_several_ranks_that_are_blamed_share_a_line():
    result = silent(LOADS, LOADS, LOADS, beats={0: 4.0, 1: 4.1, 2: 4.2})
    line = "ranks 1-2: silent for 5.9 s (heartbeat_timeout=5): still at work (train.py:12 in load: sleep(60))"
    assert format_report(result).splitlines()[1:] == [f"  {line}"]


def test_of_several_silent_ranks_the_one_with_the_earliest_heartbeat_is_the_cause():
    assert silent(LOADS, LOADS, LOADS, beats={0: 4.0, 1: 3.5, 2: 4.2}).root_cause.rank == 1


def test_an_exception_and_a_silence_are_both_failures():
    result = silent(rank_that_raised(ValueError("x"), 9.9), LOADS, beats={1: 4.0})
    assert set(result.failures) == {0, 1}


def test_a_silent_rank_that_returns_at_the_same_moment_is_still_the_cause():
    result = silent(rank_that_returned(), rank_that_returned(), beats={1: 4.0})
    assert (result.root_cause.rank, result.root_cause.kind) == (1, FailureKind.HANG)
    assert result.worker_states[0] is mpwatch.WorkerState.SUCCEEDED


def test_a_timeout_names_the_missing_rank_and_blames_none():
    """In a healthy run, too, ranks reach a collective at different times."""
    result = diagnose(make_observations(WAITS, LOADS, WAITS, stop_reason=StopReason.TIMED_OUT, timeout=10.0))
    assert format_report(result).splitlines() == [
        "the run did not end within timeout=10 s: ranks 0-2 had not returned, and rank 1 not in the collective that others waited in",
        "  ranks 0, 2: still at work (c10d.py:3 in all_reduce: work.wait())",
        "  rank 1: still at work (train.py:12 in load: sleep(60))",
    ]
    assert {failure.kind for failure in result.failures.values()} == {FailureKind.TIMEOUT}
    assert result.root_cause is None


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_a_timeout_says_that_no_rank_has_sent_the_heartbeat_that_begins_the_limit(scope):
    limits = {"stop_reason": StopReason.TIMED_OUT, "timeout": 10.0, "heartbeat_timeout": 5.0}
    beats = {**LOADS, "heartbeat": HeartbeatSample(9.0, None)}
    text = "the run did not end within timeout=10 s: ranks 0-1 had not returned"
    note = "; heartbeat_timeout=5 did not apply: it begins with a rank's first report() or heartbeat()"
    for ranks, reason in (([LOADS, LOADS], text + note), ([LOADS, beats], text)):
        if scope == "group":
            assert diagnose(make_observations(*ranks, **limits)).reason == reason
        else:
            attempts = [make_observations({}, rank, **limits) for rank in ranks]
            for number, attempt in enumerate(attempts):
                attempts[number] = replace(attempt, ranks={number: replace_rank(attempt.ranks[1], number)})
            assert merge_results([(attempt, diagnose(attempt)) for attempt in attempts]).reason == reason


@pytest.mark.parametrize(("stop_reason", "signum"), [(StopReason.TIMED_OUT, None), (StopReason.INTERRUPTED, signal.SIGTERM)])
def test_the_reason_names_all_ranks_that_do_not_return_after_a_stop_was_requested(stop_reason, signum):
    limits = {"stop_reason": stop_reason, "signum": signum, "stop_cause": "SIGTERM", "stop_timeout": 4.0}
    attempts = [make_observations(LOADS, **limits), make_observations(rank_that_returned(), LOADS, **limits)]
    attempts[1] = replace(attempts[1], ranks={1: attempts[1].ranks[1]})
    text = "a stop was requested (SIGTERM), and ranks 0-1 had not returned within StopPolicy(timeout=4)"
    assert merge_results([(attempt, diagnose(attempt)) for attempt in attempts]).reason == text


def replace_rank(observed, number):
    return replace(observed, worker=replace(observed.worker, rank=number))


def test_a_value_that_arrives_after_the_timeout_does_not_count():
    on_its_way = {**rank_that_returned(), "answer_received_at": 10.5}
    result = diagnose(
        make_observations(
            on_its_way, {**rank_that_returned(), "answer_received_at": 9.0}, stop_reason=StopReason.TIMED_OUT, timeout=10.0
        )
    )
    assert format_report(result).startswith("the run did not end within timeout=10 s: rank 0 had not returned")
    assert [failure.kind for failure in result.failures.values()] == [FailureKind.TIMEOUT]


def test_512_ranks_that_were_silent_for_nearly_the_same_time_are_a_few_lines():
    beats = {rank: 4.0 + rank / 1000 for rank in range(512)}
    assert len(format_report(silent(*[WAITS] * 511, LOADS, beats=beats)).splitlines()) == 2


@pytest.fixture
def memory():
    fd = os.memfd_create("mpwatch-test")
    os.ftruncate(fd, 2 * SLOT_SIZE)
    yield fd
    os.close(fd)


def test_a_heartbeat_sample_has_the_last_heartbeat_and_report(memory):
    heartbeat = HeartbeatWriter(open_slot(os.dup(memory), 1))
    assert (read_heartbeat(memory, 1).beat_at, read_heartbeat(memory, 1).report) == (None, None)
    heartbeat.write_heartbeat()
    first = read_heartbeat(memory, 1)
    assert (first.report, time.monotonic() - first.beat_at < 60) == (None, True)
    heartbeat.write_report(3, None, {"loss": 0.1})
    heartbeat.write_heartbeat()
    last = read_heartbeat(memory, 1)
    assert last.report[1:] == (3, None, {"loss": 0.1})
    assert first.beat_at <= last.report[0] <= last.beat_at
    assert read_heartbeat(memory, 0).beat_at is None


def test_a_half_written_report_is_ignored(memory):
    HeartbeatWriter(open_slot(os.dup(memory), 0)).write_report(3, 4, {"loss": 0.1})
    os.pwrite(memory, b"x", HEARTBEAT_AT + 20)
    assert read_heartbeat(memory, 0).report is None
    os.pwrite(memory, b"\xff" * HEARTBEAT_SIZE, HEARTBEAT_AT)  # overwritten by other code
    assert read_heartbeat(memory, 0).report is None


def test_the_size_of_a_report_is_limited(memory):
    heartbeat = HeartbeatWriter(open_slot(os.dup(memory), 0))
    with pytest.raises(ValueError, match=rf"metrics that take \d+ bytes; there is room for {MAX_REPORT_SIZE}. Pass fewer"):
        heartbeat.write_report(1, 2, {f"metric {n}": 0.5 for n in range(300)})


def test_heartbeat_and_report_do_nothing_outside_a_rank():
    mpwatch.heartbeat()
    mpwatch.report(step=1, total=2, loss=0.5)


def test_report_accepts_numbers_only():
    def report_wrong_values():
        errors = []
        for wrong in ({"loss": "low"}, {"loss": None}, {"loss": "3"}, {"step": 1.5}, {"total": "many"}):
            try:
                mpwatch.report(**wrong)
            except TypeError as error:
                errors.append(str(error))
        return errors

    (errors,) = mpwatch.run(report_wrong_values, 1)
    assert errors == [
        "report() takes numbers; loss is a str (text is not a number)",
        "report() takes numbers; loss is a NoneType (float() argument must be a string or a real number, not 'NoneType')",
        "report() takes numbers; loss is a str (text is not a number)",
        "report() takes step as an int, not a float",
        "report() takes total as an int, not a str",
    ]


def test_the_last_reports_are_in_the_result():
    def work():
        for step in range(3):
            mpwatch.report(step=step, total=3, loss=1 / (step + 1), ready=True)
        if mpwatch.current_worker().rank == 1:
            mpwatch.report(step=7)

    progress = mpwatch.run(work, 2).progress
    assert (progress[0].step, progress[0].total, progress[0].metrics) == (2, 3, {"loss": 1 / 3, "ready": 1.0})
    assert (progress[1].step, progress[1].total, progress[1].metrics) == (7, None, {})
    assert 0 < progress[0].elapsed < 60


def test_the_last_report_of_a_rank_that_was_killed_is_kept():
    def work():
        mpwatch.report(step=4)
        failing.is_killed()

    with pytest.raises(mpwatch.RunFailedError) as failed:
        mpwatch.run(work, 1)
    assert failed.value.result.progress[0].step == 4


@pytest.mark.usefixtures("_wait_for_all_stacks")
@pytest.mark.parametrize(
    "saboteur",
    [
        heartbeat_functions.stops_its_heartbeats,
        heartbeat_functions.stops_its_heartbeats_and_holds_the_gil,
        heartbeat_functions.suspends_itself,
    ],
)
def test_a_silent_rank_is_a_failure_with_all_stacks(saboteur, barrier):
    began = time.monotonic()
    with pytest.raises(mpwatch.RunFailedError, match=r"^rank 1 was silent for [\d.]+ s \(heartbeat_timeout=1\)") as failed:
        mpwatch.run(
            heartbeat_functions.sends_heartbeats_except_rank_1,
            3,
            args=(saboteur, barrier),
            heartbeat_timeout=1.0,
            grace_period=0.5,
        )
    root = failed.value.root_cause
    assert (root.rank, root.kind, root.exit_code, root.exception) == (1, FailureKind.HANG, 1, None)
    assert set(failed.value.result.failures) == {1}
    assert set(failed.value.result.stacks) == {0, 1, 2}
    assert ("suspended" if saboteur is heartbeat_functions.suspends_itself else saboteur.__name__) in root.stack
    assert time.monotonic() - began < 20


def test_a_rank_that_never_sent_a_heartbeat_has_no_limit():
    def work():
        if mpwatch.current_worker().rank == 0:
            mpwatch.heartbeat()
        else:
            signal.sigtimedwait([], 0.5)  # longer than the limit
        return True

    assert list(mpwatch.run(work, 2, heartbeat_timeout=0.1)) == [True, True]


class SlowToPickle:
    def __reduce__(self):
        signal.sigtimedwait([], 0.6)  # longer than the limit; no heartbeat is sent here
        return str, ("at last",)


def test_a_rank_that_has_returned_is_not_silent():
    def work():
        mpwatch.heartbeat()
        return SlowToPickle()

    assert list(mpwatch.run(work, 1, heartbeat_timeout=0.1)) == ["at last"]


def test_heartbeats_of_a_forked_helper_do_not_count():
    with pytest.raises(mpwatch.RunFailedError, match="was silent for"):
        mpwatch.run(heartbeat_functions.sends_heartbeats_from_a_fork, 1, heartbeat_timeout=0.2)


def test_a_watcher_that_was_suspended_with_its_ranks_blames_none():
    """Like a paused container: all ranks were silent, and none is to blame."""
    code = "import mpwatch\nfrom watcher.diagnosis import heartbeat_functions\nprint(list(mpwatch.run(heartbeat_functions.sends_heartbeats_until_sigusr1, 2, heartbeat_timeout=1.0)))\n"
    program = subprocess.Popen(
        [sys.executable, "-c", code], env=ENV, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        pids = [program.pid, *(int(program.stdout.readline()) for _ in range(2))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        signal.sigtimedwait([], 2.5)  # longer than the limit and what counts as late
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        for pid in pids[1:]:
            os.kill(pid, signal.SIGUSR1)
        assert program.communicate(timeout=60)[0] == "[True, True]\n"
    finally:
        program.kill()
        program.wait()


def test_a_watcher_that_is_busy_all_the_time_blames_a_silent_rank():
    """A thread of the program holds the GIL, so that each look at the heartbeats comes much too late."""
    is_over, barrier = threading.Event(), SPAWN.Barrier(2)
    give_up_at = time.monotonic() + 30

    def hold_gil():
        barrier.wait()
        while not is_over.wait(0.02) and time.monotonic() < give_up_at:
            ctypes.PyDLL(None).usleep(1_200_000)

    thread = threading.Thread(target=hold_gil)
    thread.start()
    try:
        with pytest.raises(mpwatch.RunFailedError, match="rank 0 was silent for"):
            mpwatch.run(heartbeat_functions.sends_one_heartbeat, 1, args=(barrier,), heartbeat_timeout=0.5, grace_period=0)
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_a_limit_must_be_a_number_of_seconds(wrong):
    with pytest.raises((TypeError, ValueError), match="heartbeat_timeout must be a number of seconds"):
        mpwatch.run(failing.rank, 1, heartbeat_timeout=wrong)
