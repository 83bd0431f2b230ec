"""WorkerGroup: what its ranks keep between calls, and when they are restarted: all, or with scope="worker" the lost ones."""

import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mpwatch
from mpwatch import FailureKind, RunFailedError, WorkerGroup, WorkerState
from support import failing, functions
from support.process_state import SPAWN, is_alive
from support.programs import python


def put(value):
    mpwatch.current_worker().state["value"] = value


def identify():
    worker = mpwatch.current_worker()
    return os.getpid(), worker.rank, worker.restart_count, worker.state.get("value")


def test_ranks_and_their_state_stay_between_calls():
    with WorkerGroup(2) as group:
        group.run(put, args=(5,))
        first, second = list(group.run(identify)), list(group.run(identify))
        assert first == second
        assert [(rank, count, value) for _, rank, count, value in first] == [(0, 0, 5), (1, 0, 5)]
        assert list(group.run(functions.double, (3,), {"plus": 1})) == [7, 7]
        assert {worker.run_id for worker in group.workers} == {worker.run_id for worker in group.run(functions.rank).workers}
        assert repr(group) == "<WorkerGroup HEALTHY: 2 ranks>"
    assert group.state is WorkerState.STOPPED
    assert not any(is_alive(pid) for pid, *_ in first)
    with pytest.raises(RuntimeError, match="this WorkerGroup is closed; make another one"):
        group.run(functions.rank)
    group.close()


def test_modules_are_imported_before_the_first_call(tmp_path, monkeypatch, eventually):
    (tmp_path / "slow_module.py").write_text("import os\nopen(os.environ['DONE'], 'a').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = tmp_path / "done"
    with WorkerGroup(1, preload=["json", "slow_module"], env={"DONE": str(done)}) as group:
        eventually(done.exists)
        assert "slow_module" in group.run(functions.list_modules)[0]


def test_an_import_that_fails_is_told_at_the_first_call():
    with WorkerGroup(1, preload=["json", "no_such_module", "decimal"]) as group:
        with pytest.raises(RunFailedError, match="no_such_module") as failed:
            group.run(functions.rank)
        assert isinstance(failed.value.__cause__, ModuleNotFoundError)
        assert list(group.run(functions.rank)) == [0]
        assert {worker.restart_count for worker in group.workers} == {0}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"nprocs": 0}, ValueError, "nprocs"),
        ({"check": 1}, TypeError, "check must be True or False, not 1"),
        ({"preload": "torch"}, TypeError, "preload must be a sequence of names of modules"),
        ({"scope": "ranks"}, ValueError, "scope must be 'group' or 'worker', not 'ranks'"),
        ({"scope": "worker", "backend": "gloo"}, ValueError, "scope='worker' is for ranks that do not communicate, but"),
        ({"env": lambda worker: {"X": str(1 / worker.rank)}}, ZeroDivisionError, "division"),
    ],
)
def test_a_bad_option_leaves_nothing(options, error, text):
    with pytest.raises(error, match=text):
        WorkerGroup(**{"nprocs": 2} | options)


def test_a_bad_call_leaves_the_ranks_as_they_were():
    with WorkerGroup(1) as group:
        before = list(group.run(os.getpid))
        for arguments, error, text in (
            (("train",), TypeError, "fn must be callable"),
            ((print, 5), TypeError, "args must be a sequence"),
            ((functions.double, (1, 2, 3)), TypeError, r"fn double\(x, plus=0\) cannot be called"),
            ((functions.double, (threading.Lock(),)), mpwatch.LaunchError, r"args\[0\].*lock"),
        ):
            with pytest.raises(error, match=text):
                group.run(*arguments)
        with pytest.raises(ValueError, match="timeout must be a number of seconds"):
            group.run(abs, (-1,), timeout=0)
        assert list(group.run(os.getpid)) == before


def raise_in(ranks, text="bad"):
    if functions.rank() in ranks:
        error = ValueError(text)
        error.detail = {"rank": functions.rank()}
        raise error
    return functions.rank()


def test_ranks_stay_if_some_raise_and_the_others_return(caplog):
    with WorkerGroup(2, check=False) as group:
        group.run(put, args=(5,))
        before = list(group.run(identify))
        for ranks in ({1}, {0, 1}):
            result = group.run(raise_in, (ranks, f"{len(ranks)} are bad"))
            cause = result.root_cause
            assert (str(cause.exception), cause.exception.detail) == (f"{len(ranks)} are bad", {"rank": cause.rank})
            assert set(result.failures) == ranks
            assert {rank for rank, state in result.worker_states.items() if state is WorkerState.FAILED} == ranks
        assert list(group.run(identify)) == before
        assert group.state is WorkerState.HEALTHY
    assert not caplog.records


@pytest.mark.parametrize("fail", [failing.raises_value_error, failing.is_killed])
def test_ranks_are_restarted_if_one_has_to_be_stopped(fail, barrier, caplog):
    with WorkerGroup(3) as group:
        group.run(put, args=(5,))
        before = list(group.run(os.getpid))
        with pytest.raises(RunFailedError) as caught:
            group.run(failing.call_on_rank_1, (fail, barrier))
        assert caught.value.root_cause.rank == 1
        assert caught.value.result.worker_states[0] is WorkerState.STOPPED
        assert group.state is WorkerState.UNHEALTHY
        assert not any(is_alive(pid) for pid in before)
        assert [tuple(it)[1:] for it in group.run(identify)] == [(0, 1, None), (1, 1, None), (2, 1, None)]
        assert [worker.restart_count for worker in group.workers] == [1, 1, 1]
        assert group.state is WorkerState.HEALTHY
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("all ranks are restarted: not all of them survived the last call: rank 1 ")


def test_a_rank_that_dies_between_two_calls_is_noticed(caplog, eventually):
    with WorkerGroup(2) as group:
        before = list(group.run(os.getpid))
        os.kill(before[1], signal.SIGKILL)
        eventually(lambda: group.state is WorkerState.UNHEALTHY)
        eventually(lambda: not any(is_alive(pid) for pid in before))  # without a call
        assert [count for _, _, count, _ in group.run(identify)] == [1, 1]
    lost, restarted = (record.message for record in caplog.records)
    assert lost.startswith(f"rank 1 (pid {before[1]}) was killed by SIGKILL")
    assert restarted == "all ranks are restarted: a rank was lost while it had no call"


def test_heartbeats_and_reports_belong_to_one_call():
    with WorkerGroup(1, heartbeat_timeout=0.3) as group:
        assert [progress.step for progress in group.run(lambda: mpwatch.report(step=7)).progress.values()] == [7]
        assert group.run(time.sleep, (1.0,)).progress == {}


def test_an_idle_group_uses_no_cpu_time(eventually):
    """The watcher thread waits, and nothing wakes it up."""
    with WorkerGroup(2) as group:
        group.run(functions.rank)
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "mpwatch")

        def count_switches(seconds):
            threading.Event().wait(seconds)
            lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
            return next(line for line in lines if line.startswith("voluntary_ctxt_switches"))

        # it may wake up once more, when the caller's own thread has made no call for a while, or for another program's `ps`
        eventually(lambda: count_switches(0) == count_switches(0.5))


def test_a_call_of_a_warm_group_costs_at_most_five_milliseconds_of_the_program_s_time():
    with WorkerGroup(2) as group:
        group.run(functions.rank)
        used = []
        for _ in range(3):  # on a busy machine, the same work may take more CPU time
            before = time.process_time()
            for number in range(100):
                assert list(group.run(functions.double, [number])) == [2 * number] * 2
            used.append(time.process_time() - before)
        assert min(used) < 0.5


def test_a_group_may_be_made_in_one_thread_and_used_in_others():
    with ThreadPoolExecutor(1) as maker:
        group = maker.submit(WorkerGroup, 2).result()
    with group, ThreadPoolExecutor(3) as users:
        found = [users.submit(lambda i: list(group.run(functions.double, (i,))), i) for i in range(9)]
        assert [future.result() for future in found] == [[2 * i, 2 * i] for i in range(9)]


def restart_counts(group):
    return [worker.restart_count for worker in group.workers]


@pytest.fixture
def group():
    """A group of which each rank is restarted alone."""
    with WorkerGroup(3, scope="worker") as group:
        yield group


def pids_of(group):
    return group.run(os.getpid).return_values


def list_new(before, after):
    return {rank for rank in before if before[rank] != after[rank]}


def test_a_lost_rank_ends_its_own_call_only_and_is_restarted_by_the_next_one_that_needs_it(group, caplog, eventually):
    pids = pids_of(group)
    event = SPAWN.Event()
    other = group.submit(lambda: event.wait(60) and os.getpid(), ranks=1)
    with pytest.raises(RunFailedError, match=r"\n  the next call starts rank 0 again; its state is lost$") as caught:
        group.run(failing.is_killed, ranks=0)
    assert caught.value.root_cause.kind is FailureKind.SIGNAL
    assert list(caught.value.result.failures) == [0]
    event.set()
    assert other.result(60).return_values == {1: pids[1]}
    assert group.run(os.getpid, ranks=2).return_values == {2: pids[2]}
    assert (group.state, restart_counts(group)) == (WorkerState.UNHEALTHY, [0, 0, 0])
    assert sorted(group.stacks()) == [1, 2]
    assert list_new(pids, pids_of(group)) == {0}
    assert (group.state, restart_counts(group)) == (WorkerState.HEALTHY, [1, 0, 0])
    (text,) = [text for text in caplog.messages if "restarted" in text]
    assert text.startswith("rank 0 is restarted: rank 0 was killed by SIGKILL (not sent by mpwatch: ")
    os.kill(pids[1], signal.SIGKILL)  # while it has no call
    eventually(lambda: group.state is WorkerState.UNHEALTHY)
    assert list_new(pids, pids_of(group)) == {0, 1}
    assert any(text.endswith("while it had no call; the next call restarts it") for text in caplog.messages)
    assert "rank 1 is restarted: it was lost while it had no call" in caplog.messages


def test_all_ranks_of_a_call_end_with_a_lost_one_and_a_call_restarts_those_that_it_needs(group, caplog):
    pids = pids_of(group)
    with pytest.raises(RunFailedError) as caught:
        group.run(failing.call_on_rank_1, (failing.is_killed, SPAWN.Barrier(2)), ranks=[1, 2])
    assert caught.value.root_cause.rank == 1
    assert group.run(os.getpid, ranks=2)[2] != pids[2]
    assert restart_counts(group) == [0, 0, 1]
    (text,) = [text for text in caplog.messages if "restarted" in text]
    assert text.startswith("rank 2 is restarted: rank ")
    assert list_new(pids, pids_of(group)) == {1, 2}


def test_observers_see_each_restart_with_its_rank():
    seen = []
    with WorkerGroup(2, scope="worker", on_event=seen.append) as group:
        with pytest.raises(RunFailedError):
            group.run(failing.is_killed, ranks=1)
        group.run(os.getpid)
    started = [(event.ranks, event.attempt) for event in seen if isinstance(event, mpwatch.events.WorkerStarted)]
    assert started == [((0,), 0), ((1,), 0), ((1,), 1)]
    ended = next(event for event in seen if isinstance(event, mpwatch.events.RunEnded))
    assert ended.restarts == 1


def test_the_example():
    output = python(str(Path(__file__).parent.parent / "examples" / "warm_group.py")).stdout
    assert output == "points by rank: [1000, 1000, 1000, 1000]\ny = 3.0 x + 2.0\n"
