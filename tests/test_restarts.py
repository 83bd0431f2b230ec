"""Runs that are started again after a failure: all ranks together, in processes of their own."""

import os
import pickle
import re
from pathlib import Path

import conftest
import pytest
import reborn
from conftest import SPAWN, is_alive

import mpwatch
from mpwatch import FailureKind, RestartPolicy, WorkerState
from mpwatch.events import Restarting, WorkerExited, WorkerStarted
from mpwatch.watcher.processes.process_pool import ProcessPool


def meetings(lives, nprocs=2):
    """A barrier for each life: one whose ranks were killed in it is good for nothing."""
    return [SPAWN.Barrier(nprocs) for _ in range(lives)]


def failed(*args, **options):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(*args, **options)
    return caught.value


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_ranks_that_have_failed_are_started_again():
    result = mpwatch.run(reborn.fails, 3, args=(2, 1, meetings(3, 3)), max_restarts=2)
    assert [life for life, *_ in result] == [2, 2, 2]
    assert (result.state, result.restarts, result.failures, result.root_cause) == (WorkerState.SUCCEEDED, 2, {}, None)
    assert set(result.worker_states.values()) == {WorkerState.SUCCEEDED}
    assert (result.not_restarted, result.reason, sorted(result.return_values)) == ("", "", [0, 1, 2])
    assert [worker.restart_count for worker in result.workers] == [2, 2, 2]
    first, second, third = result.attempts
    for number, attempt in enumerate((first, second)):
        assert (attempt.number, attempt.ranks, attempt.state) == (number, (0, 1, 2), WorkerState.FAILED)
        assert set(attempt.failures) == {1}  # the others were stopped
        assert attempt.root_cause is attempt.failures[1]
        assert repr(attempt.root_cause.exception) == f"ValueError('life {number}')"
    assert (third.number, third.state, third.failures, third.root_cause) == (2, WorkerState.SUCCEEDED, {}, None)
    assert first.started_at < second.started_at < third.started_at
    assert all(attempt.elapsed > 0 for attempt in result.attempts)


def test_each_life_has_a_port_of_its_own_and_is_counted():
    seen = {}

    def env(worker):
        seen.setdefault(worker.restart_count, set()).add(worker.master_port)
        return {"LIFE": str(worker.restart_count)}

    result = mpwatch.run(reborn.fails, 2, args=(2, 0), max_restarts=4, env=env)
    assert [len(ports) for ports in seen.values()] == [1, 1, 1]
    assert len(set.union(*seen.values())) == 3
    for rank, (life, port, variables, _) in enumerate(result):
        assert (life, port) == (2, result.workers[rank].master_port)
        assert variables == {
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "TORCHELASTIC_RUN_ID": result.workers[0].run_id,
        }
        assert {port} == seen[2]


def test_the_old_ranks_and_their_helpers_are_gone_before_new_ones_start(tmp_path, monkeypatch):
    start, seen = ProcessPool.start, []

    def look(crew, worker, env):
        if worker.restart_count:
            files = tmp_path.glob(f"{worker.restart_count - 1}-*")
            pids = [[int(pid) for pid in file.read_text().split()] for file in files]
            left = [rank for rank, _ in pids if Path(f"/proc/{rank}").exists()]  # not even as zombies
            seen.append((len(pids), left, [helper for _, helper in pids if is_alive(helper)]))
        return start(crew, worker, env)

    monkeypatch.setattr(ProcessPool, "start", look)
    assert list(mpwatch.run(reborn.has_a_helper, 2, args=(tmp_path, 3), max_restarts=3)) == [3, 3]
    assert seen == [(2, [], [])] * 6


def test_of_one_that_is_replaced_nothing_is_left_either(tmp_path, monkeypatch):
    start, seen = ProcessPool.start, []

    def look(crew, worker, env):
        if worker.restart_count:
            rank, helper = map(int, (tmp_path / f"{worker.restart_count - 1}-0").read_text().split())
            seen.append((Path(f"/proc/{rank}").exists(), is_alive(helper)))
        return start(crew, worker, env)

    monkeypatch.setattr(ProcessPool, "start", look)
    lives = 2

    def dies_beside_a_helper(folder):
        if reborn.life() < lives:
            pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)
            (folder / f"{reborn.life()}-0").write_text(f"{os.getpid()} {pid}")
            os._exit(3)
        return reborn.life()

    policy = RestartPolicy(lives, scope="worker")
    assert list(mpwatch.run(dies_beside_a_helper, 1, args=(tmp_path,), restart_policy=policy)) == [2]
    assert seen == [(False, False)] * 2


def test_what_is_called_is_pickled_once():
    argument = reborn.CountsItsPickling()
    result = mpwatch.run(lambda text: text if reborn.life() == 2 else 1 / 0, 2, args=(argument,), max_restarts=2)
    assert list(result) == ["an argument"] * 2
    assert argument.times == 1


def test_large_arguments_are_as_they_were():
    def change(array):
        if array[0]:
            return "changed"
        array[:] = b"x" * len(array)
        if reborn.life() == 0:
            raise ValueError("the first time")
        return len(array)

    assert list(mpwatch.run(change, 2, args=(bytearray(1 << 20),), max_restarts=1)) == [1 << 20] * 2


# --- what is said of a run that fails every time


def test_the_error_names_what_happened_each_time():
    error = failed(reborn.dies, 1, args=("kill", "exit", "raise"), max_restarts=2)
    verdict, *lines = str(error).splitlines()
    assert verdict.startswith("rank 0 failed first: ValueError: the third time (reborn.py:")
    assert lines[0] == "  started again 2 times, and then no more: all restarts are used up (max_restarts=2)"
    starts = [
        r"    first start, [\d.]+ s: rank 0 was killed by SIGKILL \(not sent by mpwatch",
        r"    restart 1, [\d.]+ s: rank 0 ended with exit code 3 and no result",
        r"    restart 2, [\d.]+ s: rank 0 failed first: ValueError: the third time \(reborn.py:",
    ]
    assert all(re.match(*pair) for pair in zip(starts, lines[1:], strict=True))
    result = error.result
    assert (result.restarts, len(result.attempts), result.state) == (2, 3, WorkerState.FAILED)
    assert [attempt.root_cause.kind.name for attempt in result.attempts] == ["SIGNAL", "EXIT", "EXCEPTION"]
    assert error.root_cause is result.attempts[-1].root_cause
    assert error.__cause__ is error.root_cause.exception
    assert (error.failures, result.return_values) == ({0: error.root_cause}, {})


def test_an_error_with_its_story_can_be_pickled():
    error = failed(reborn.always_raises, 2, max_restarts=2)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert [event.name for event in again.result.events] == [event.name for event in error.result.events]
    assert [repr(attempt.root_cause.exception) for attempt in again.result.attempts] == [
        repr(attempt.root_cause.exception) for attempt in error.result.attempts
    ]
    assert again.result.root_cause is again.result.attempts[-1].root_cause


@pytest.mark.parametrize(
    ("fn", "args", "status"),
    [(reborn.exits_with, (3, 4, 5), 5), (reborn.dies, ("raise", "exit", "kill"), 137), (reborn.exits_with, (3, 4, 0), None)],
)
def test_a_program_ends_with_the_status_of_the_last_time(fn, args, status, capfd):
    if status is None:
        assert list(mpwatch.main(fn, 1, args=args, max_restarts=2)) == [None]
        return
    with pytest.raises(SystemExit) as caught:
        mpwatch.main(fn, 1, args=args, max_restarts=2)
    assert caught.value.code == status
    assert "started again 2 times" in capfd.readouterr().err


def test_values_that_cannot_be_rebuilt_are_no_reason_to_start_again():
    """That is found out here, when all is over."""
    error = failed(reborn.returns_the_second_time, 1, args=(reborn.Unbuildable,), max_restarts=3)
    assert "LookupError: not here" in str(error)
    assert [attempt.state for attempt in error.result.attempts] == [WorkerState.FAILED] * 2
    assert error.result.restarts == 1
    assert error.result.not_restarted == "all ranks had returned, and what one returned cannot be rebuilt"


def test_values_that_cannot_be_sent_are_a_failure_as_any():
    error = failed(reborn.returns_the_second_time, 1, args=(reborn.Unpicklable,), max_restarts=3)
    assert [attempt.root_cause.kind for attempt in error.result.attempts] == [FailureKind.EXCEPTION] * 2
    assert "TypeError before the first heartbeat or report" in error.result.not_restarted


def test_check_false_returns_the_story():
    result = mpwatch.run(reborn.always_raises, 2, max_restarts=1, check=False)
    assert (result.state, result.restarts, len(result.attempts)) == (WorkerState.FAILED, 1, 2)
    assert result.not_restarted == "all restarts are used up (max_restarts=1)"
    table = result._repr_html_()
    assert "started again once, and then no more" in table
    assert [table.count(f'left">{attempt}, ') for attempt in ("first start", "restart 1", "restart 2")] == [1, 1, 0]


def test_who_asks_for_no_restart_hears_of_none():
    error = failed(reborn.always_raises, 1)
    assert "restart" not in str(error)
    assert "started again" not in str(error)
    assert (error.result.restarts, len(error.result.attempts), error.result.not_restarted) == (0, 1, "")


# --- which failures


def test_programming_errors_are_not_tried_again_unless_the_rank_had_begun():
    error = failed(reborn.always_raises, 1, args=(TypeError,), max_restarts=2)
    assert (error.result.restarts, "  not started again: TypeError before" in str(error)) == (0, True)
    assert failed(reborn.beats_and_raises, 1, args=(TypeError,), max_restarts=2).result.restarts == 2


def test_a_later_life_has_not_begun_because_an_earlier_one_had():
    def fn():
        if reborn.life() == 0:
            mpwatch.report(step=1)
        raise TypeError("wrong")

    assert failed(fn, 1, max_restarts=5).result.restarts == 1


def test_a_predicate_is_asked_in_the_callers_thread_about_each_failure():
    import threading

    asked = []

    def retry_if(failure):
        asked.append((threading.current_thread(), failure.kind))
        return failure.kind is not FailureKind.EXCEPTION

    error = failed(reborn.dies, 1, args=("kill", "exit", "raise"), restart_policy=RestartPolicy(9, retry_if=retry_if))
    here = threading.current_thread()
    assert asked == [(here, FailureKind.SIGNAL), (here, FailureKind.EXIT), (here, FailureKind.EXCEPTION)]
    assert "it is no failure that `retry_if` wants" in error.result.not_restarted


@pytest.mark.parametrize("scope", ["group", "worker"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_what_a_predicate_raises_comes_out(scope, error):
    def retry_if(failure):
        raise error("in the predicate")

    events = []
    with pytest.raises(error, match="in the predicate") as caught:
        mpwatch.run(
            reborn.fails,
            3,
            args=(1, 1),
            restart_policy=RestartPolicy(scope=scope, retry_if=retry_if),
            on_event=events.append,
        )
    notes = getattr(caught.value, "__notes__", ())
    assert len(notes) == (error is ZeroDivisionError)
    for note in notes:
        assert note.startswith("raised after ranks had failed:\n    first start, ")
        assert "rank 1 failed first: ValueError: life 0" in note
    expected = WorkerState.FAILED if error is ZeroDivisionError else WorkerState.STOPPED
    assert (events[-1].name, events[-1].state) == ("run_ended", expected)
    assert "in the predicate" in events[-1].reason


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_what_env_raises_the_second_time_comes_out(scope):
    def env(worker):
        if worker.restart_count:
            raise LookupError(f"no room for rank {worker.rank}")
        return {}

    with pytest.raises(LookupError, match="no room for rank") as caught:
        mpwatch.run(reborn.fails, 2, args=(1, 1), restart_policy=RestartPolicy(scope=scope), env=env)
    assert "rank 1 failed first" in caught.value.__notes__[0]


def test_what_env_returns_the_second_time_is_checked():
    with pytest.raises(ValueError, match=r"what env\(\) returned may not set RANK='3'"):
        mpwatch.run(
            reborn.always_raises, 1, max_restarts=1, env=lambda worker: {"RANK": "3"} if worker.restart_count else {}
        )


def test_no_progress_ends_it():
    policy = RestartPolicy(9, max_no_progress=2)
    error = failed(reborn.reports, 1, args=(3, 5, 4, 5, 5), restart_policy=policy)
    assert len(error.result.attempts) == 4
    assert error.result.not_restarted == "no step beyond 5 was reported after 2 restarts in a row (max_no_progress=2)"


# --- ranks that do not come up


def test_ranks_that_never_start_are_not_tried_again_unless_it_is_asked_for():
    nowhere = {"PYTHONHOME": "/nonexistent"}
    error = failed(reborn.who, 2, max_restarts=2, env=nowhere)
    assert (error.result.restarts, error.root_cause.kind) == (0, FailureKind.START)
    error = failed(reborn.who, 2, restart_policy=RestartPolicy(2, retry_if={FailureKind.START}), env=nowhere)
    assert [attempt.root_cause.kind for attempt in error.result.attempts] == [FailureKind.START] * 3
    assert str(error).count("never started: its interpreter ended with exit code 1") >= 4


def test_ranks_that_come_up_at_last():
    def env(worker):
        return {"PYTHONHOME": "/nonexistent"} if worker.restart_count < 2 and worker.rank == 1 else {}

    result = mpwatch.run(reborn.life, 2, restart_policy=RestartPolicy(2, retry_if=FailureKind.START), env=env)
    assert list(result) == [2, 2]
    assert [set(attempt.failures) for attempt in result.attempts] == [{1}, {1}, set()]


def test_who_did_not_come_up_again_and_why(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import signal\nwhile True: signal.pause()\n")

    def env(worker):
        path = os.environ.get("PYTHONPATH", "")
        return {"PYTHONPATH": f"{tmp_path}:{path}"} if worker.restart_count and worker.rank == 1 else {}

    error = failed(reborn.fails, 2, args=(1, 0), max_restarts=5, env=env, start_timeout=3.0)
    root = error.root_cause
    assert (root.rank, root.kind, error.result.restarts) == (1, FailureKind.START, 1)
    assert str(error).startswith("rank 1 never started: ")
    assert "was not ready after 3 s" in str(error).splitlines()[0]
    assert "first start" in str(error)


# --- the time it takes


def test_a_delay_is_kept():
    events = mpwatch.run(reborn.fails, 1, args=(3, 0), restart_policy=RestartPolicy(3, delay=0.02, jitter=0)).events
    restartings, starts = of_kind(Restarting, events), of_kind(WorkerStarted, events)
    assert [event.delay for event in restartings] == [0.02, 0.04, 0.08]
    assert [event.restarts_left for event in restartings] == [2, 1, 0]
    for restarting, start in zip(restartings, starts[1:], strict=True):
        assert start.monotonic >= restarting.monotonic + restarting.delay


def test_the_timeout_is_for_all_lives_together():
    error = failed(reborn.waits_the_second_time, 2, timeout=1.5, max_restarts=9)
    assert isinstance(error, mpwatch.RunTimeoutError)
    assert str(error).startswith("the run did not end within timeout=1.5 s: ranks 0-1 had not returned")
    assert [attempt.state for attempt in error.result.attempts] == [WorkerState.FAILED] * 2
    assert "  started again once" in str(error)


def test_a_delay_longer_than_the_time_that_is_left_is_not_begun():
    error = failed(reborn.always_raises, 2, timeout=30, restart_policy=RestartPolicy(delay=30, jitter=0))
    assert not isinstance(error, mpwatch.RunTimeoutError)
    assert (error.result.restarts, "`timeout` leaves " in error.result.not_restarted) == (0, True)


# --- many of them


def resident_megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def look_at_self(seen):
    """A predicate that looks at this process: all ranks that it is asked about are gone then."""

    def retry_if(failure):
        state = conftest.state()
        sizes = [len(state[what]) for what in ("children", "descriptors", "threads", "shared memory", "temporary files")]
        seen.append((*sizes, resident_megabytes()))
        return True

    return retry_if


def test_many_restarts_leak_nothing():
    """The check after each test does the rest."""
    seen = []
    policy = RestartPolicy(conftest.RUNS, retry_if=look_at_self(seen))
    result = mpwatch.run(reborn.fails, 2, args=(conftest.RUNS, 1), restart_policy=policy)
    assert [life for life, *_ in result] == [conftest.RUNS] * 2
    assert len({tuple(look[:-1]) for look in seen}) == 1
    assert seen[-1][-1] - seen[20][-1] < 4
    assert len(of_kind(WorkerExited, result.events)) == 2 * (conftest.RUNS + 1)


def test_ranks_that_are_replaced_one_by_one_leak_nothing():
    seen = []
    policy = RestartPolicy(41, scope="worker", retry_if=look_at_self(seen))
    result = mpwatch.run(reborn.raises_by_itself, 2, args=(40,), restart_policy=policy)
    assert (list(result), result.restarts) == ([40, 41], 81)
    for n in range(len(seen[0]) - 1):  # of the other rank, which lives or not, there are a few; of a leak, sixty by then
        assert max(look[n] for look in seen[-20:]) < min(look[n] for look in seen[:20]) + 10
    assert seen[-1][-1] - seen[20][-1] < 4
