"""`mpwatch.submit`: a run in a thread of its own. How it is awaited, stopped and looked into, and how it ends with a program."""

import asyncio
import atexit
import os
import signal
import threading
import time
from concurrent.futures import wait

import pytest

import mpwatch
from mpwatch import RunFailedError, WorkerState
from support import failing, functions
from support.process_state import SPAWN, children, is_alive
from support.programs import call, in_own_process


def report_and_wait(barrier):
    mpwatch.report(step=7, loss=0.5)
    os.write(1, b"%d\n" % os.getpid())
    barrier.wait()
    time.sleep(1000)


def ignore_sigint_and_wait(barrier):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    barrier.wait()
    failing.wait_to_be_stopped()


def submit_waiting(function=report_and_wait, **options):
    barrier = SPAWN.Barrier(3)
    handle = mpwatch.submit(function, 2, args=(barrier,), **options)
    barrier.wait(60)
    return handle


def test_the_result_of_a_run():
    handle = mpwatch.submit(functions.double, 2, args=(mpwatch.PerRank([1, 2]),), kwargs={"plus": 1})
    assert list(handle.result(60)) == [3, 5]
    assert handle.state is WorkerState.SUCCEEDED
    assert [worker.rank for worker in handle.workers] == [0, 1]
    assert not handle.cancel()
    handle.terminate()  # does nothing
    assert not mpwatch.submit(functions.rank, 1).cancel()  # it has begun


def test_several_runs_at_the_same_time_that_can_be_awaited():
    async def run():
        handles = [mpwatch.submit(functions.double, 1, args=(number,)) for number in range(3)]
        return [result[0] for result in await asyncio.gather(*handles)]

    assert asyncio.run(run()) == [0, 2, 4]


def test_a_failure_is_raised_by_result():
    handle = mpwatch.submit(failing.raises_value_error, 1)
    with pytest.raises(RunFailedError) as caught:
        handle.result(60)
    assert isinstance(caught.value.__cause__, ValueError)
    assert handle.state is WorkerState.FAILED
    result = mpwatch.submit(failing.raises_value_error, 1, check=False).result(60)
    assert result.root_cause.rank == 0


def test_arguments_are_checked_and_pickled_at_once():
    numbers = [1]
    handle = mpwatch.submit(len, 1, args=(numbers,))
    numbers.append(2)
    assert handle.result(60)[0] == 1
    with pytest.raises(TypeError, match="check must be True or False"):
        mpwatch.submit(functions.rank, 1, check=1)


def test_it_can_be_looked_into():
    with submit_waiting() as handle:
        assert handle.state is WorkerState.HEALTHY
        assert not handle.done()
        assert [(last.step, last.metrics) for last in handle.progress().values()] == [(7, {"loss": 0.5})] * 2
        assert all(0 < last.elapsed < 60 for last in handle.progress().values())
        assert "in report_and_wait" in handle.stacks()[1]
    assert handle.stacks() == {}
    assert handle.progress()[0].step == 7


def test_terminate_interrupts_the_ranks_and_waits_for_them(tmp_path):
    path, before, after = tmp_path / "checkpoint", children(), []

    def save_at_sigint(barrier):
        try:
            barrier.wait()  # SIGINT may come before this returns
            time.sleep(1000)
        except KeyboardInterrupt:
            path.write_text("saved")
            raise

    handle = submit_waiting(save_at_sigint)
    handle.add_done_callback(lambda _: after.append(children()))
    handle.terminate()
    assert path.read_text() == "saved"
    assert after == [before]  # a callback is called when nothing is left
    with pytest.raises(RunFailedError, match=r"^the run was stopped: terminate\(\) was called"):
        handle.result(0)
    assert handle.state is WorkerState.STOPPED


def test_a_rank_that_ignores_it_is_killed_after_the_grace_period_or_by_a_second_terminate():
    handle = submit_waiting(ignore_sigint_and_wait, grace_period=0.2, check=False)
    handle.terminate()
    result = handle.result(0)
    assert (result.state, result.reason) == (WorkerState.STOPPED, "the run was stopped: terminate() was called")
    handle = submit_waiting(ignore_sigint_and_wait, grace_period=1000, check=False)
    first = threading.Thread(target=handle.terminate)
    first.start()
    while handle.state is not WorkerState.STOPPED:
        handle.terminate()
    first.join()
    assert handle.result(0).state is WorkerState.STOPPED


def test_a_block_that_raises_stops_the_run():
    with pytest.raises(ZeroDivisionError), submit_waiting() as handle:
        1 / 0
    assert handle.state is WorkerState.STOPPED


def end_while_a_run_goes_on():
    submit_waiting()
    raise SystemExit(3)


def run_in_a_daemon_thread():
    barrier = SPAWN.Barrier(3)
    threading.Thread(target=mpwatch.run, args=(report_and_wait, 2), kwargs={"args": (barrier,)}, daemon=True).start()
    barrier.wait(60)


def end_just_after_submit():
    """Ranks could start only when Python has begun to end."""
    has_ended, has_started = threading.Event(), threading.Event()
    atexit.register(lambda: has_ended.set() or has_started.wait(1))
    options = {"env": lambda _: {"ENDED": str(has_ended.wait())}}
    options["on_event"] = lambda event: event.name == "worker_started" and has_started.set()
    mpwatch.submit(time.sleep, 1, args=(1000,), **options)


@pytest.mark.parametrize(
    ("function", "status", "ranks"),
    [(end_while_a_run_goes_on, 3, 2), (run_in_a_daemon_thread, 0, 2), (end_just_after_submit, 0, 0)],
)
def test_a_program_that_ends_stops_its_ranks(function, status, ranks):
    began = time.monotonic()
    ended = call(function, check=False)
    assert time.monotonic() - began < 60
    assert (ended.returncode, ended.stderr) == (status, "")
    pids = ended.stdout.split()
    assert len(pids) == ranks
    assert not any(is_alive(int(pid)) for pid in pids)


@in_own_process
def test_ctrl_c_while_the_program_waits():
    barrier = SPAWN.Barrier(3)
    with mpwatch.submit(report_and_wait, 2, args=(barrier,)) as handle:
        threading.Thread(target=lambda: (barrier.wait(60), os.kill(os.getpid(), signal.SIGINT))).start()
        with pytest.raises(KeyboardInterrupt):
            handle.result()
    assert handle.state is WorkerState.STOPPED
    assert not wait([handle], 0).not_done
