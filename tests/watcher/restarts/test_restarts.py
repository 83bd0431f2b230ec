"""Restarts of all ranks together after a failure, with real processes."""

import os
import pickle
import re
import time
from pathlib import Path

import pytest

import mpwatch
from mpwatch import FailureKind, RestartPolicy, WorkerState
from mpwatch.events import Restarting, WorkerExited, WorkerStarted
from mpwatch.watcher.processes.process_pool import ProcessPool
from support import process_state
from support.process_state import SPAWN, is_alive
from watcher.restarts import attempt_functions


def make_barriers(attempts, nprocs=2):
    """Return a barrier for each attempt: one whose ranks were killed at it is unusable."""
    return [SPAWN.Barrier(nprocs) for _ in range(attempts)]


def failed(*args, **options):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(*args, **options)
    return caught.value


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_failed_ranks_are_restarted():
    started_at = time.monotonic()
    result = mpwatch.run(attempt_functions.fails, 3, args=(2, 1, make_barriers(3, 3)), max_restarts=2)
    assert [attempt for attempt, *_ in result] == [2, 2, 2]
    assert (result.state, result.restarts, result.failures, result.root_cause) == (WorkerState.SUCCEEDED, 2, {}, None)
    assert set(result.worker_states.values()) == {WorkerState.SUCCEEDED}
    assert (result.notes, result.reason, sorted(result.return_values)) == ((), "", [0, 1, 2])
    assert [worker.restart_count for worker in result.workers] == [2, 2, 2]
    first, second, third = result.attempts
    for number, attempt in enumerate((first, second)):
        assert (attempt.number, attempt.ranks, attempt.state) == (number, (0, 1, 2), WorkerState.FAILED)
        assert set(attempt.failures) == {1}  # the others were stopped
        assert attempt.root_cause is attempt.failures[1]
        assert repr(attempt.root_cause.exception) == f"ValueError('attempt {number}')"
    assert (third.number, third.state, third.failures, third.root_cause) == (2, WorkerState.SUCCEEDED, {}, None)
    assert re.fullmatch(r"first start, \d\.\d s: rank 1 failed first: ValueError: attempt 0 \(.*\)", str(first))
    assert re.fullmatch(r"restart 2, \d\.\d s: SUCCEEDED", str(third))
    assert first.started_at < second.started_at < third.started_at
    assert all(attempt.elapsed > 0 for attempt in result.attempts)
    assert sum(attempt.elapsed for attempt in result.attempts) < result.elapsed < time.monotonic() - started_at


def test_each_attempt_has_its_own_port_and_number():
    seen = {}

    def env(worker):
        seen.setdefault(worker.restart_count, set()).add(worker.master_port)
        return {"LIFE": str(worker.restart_count)}

    result = mpwatch.run(attempt_functions.fails, 2, args=(2, 0), max_restarts=4, env=env)
    assert [len(ports) for ports in seen.values()] == [1, 1, 1]
    assert len(set.union(*seen.values())) == 3
    for rank, (attempt, port, variables, _) in enumerate(result):
        assert (attempt, port) == (2, result.workers[rank].master_port)
        assert variables == {
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "TORCHELASTIC_RUN_ID": result.workers[0].run_id,
        }
        assert {port} == seen[2]


def test_the_old_ranks_and_their_helpers_are_gone_before_a_restart(tmp_path, monkeypatch):
    start, seen = ProcessPool.start, []

    def check_and_start(pool, setup):
        if setup.worker.restart_count:
            files = tmp_path.glob(f"{setup.worker.restart_count - 1}-*")
            pids = [[int(pid) for pid in file.read_text().split()] for file in files]
            left = [rank for rank, _ in pids if Path(f"/proc/{rank}").exists()]  # not even as zombies
            seen.append((len(pids), left, [helper for _, helper in pids if is_alive(helper)]))
        return start(pool, setup)

    monkeypatch.setattr(ProcessPool, "start", check_and_start)
    assert list(mpwatch.run(attempt_functions.starts_a_helper, 2, args=(tmp_path, 3), max_restarts=3)) == [3, 3]
    assert seen == [(2, [], [])] * 6


def test_a_restarted_rank_and_its_helpers_are_gone_before_its_restart(tmp_path, monkeypatch):
    start, seen = ProcessPool.start, []

    def check_and_start(pool, setup):
        if setup.worker.restart_count:
            rank, helper = map(int, (tmp_path / f"{setup.worker.restart_count - 1}-0").read_text().split())
            seen.append((Path(f"/proc/{rank}").exists(), is_alive(helper)))
        return start(pool, setup)

    monkeypatch.setattr(ProcessPool, "start", check_and_start)
    attempts = 2

    def starts_a_helper_then_exits(folder):
        if attempt_functions.attempt() < attempts:
            pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)
            (folder / f"{attempt_functions.attempt()}-0").write_text(f"{os.getpid()} {pid}")
            os._exit(3)
        return attempt_functions.attempt()

    policy = RestartPolicy(attempts, scope="worker")
    assert list(mpwatch.run(starts_a_helper_then_exits, 1, args=(tmp_path,), max_restarts=policy)) == [2]
    assert seen == [(False, False)] * 2


def test_the_call_is_pickled_once():
    argument = attempt_functions.CountsItsPickling()
    result = mpwatch.run(
        lambda text: text if attempt_functions.attempt() == 2 else 1 / 0, 2, args=(argument,), max_restarts=2
    )
    assert list(result) == ["an argument"] * 2
    assert argument.times == 1


def test_large_arguments_are_unchanged_after_a_restart():
    def change(array):
        if array[0]:
            return "changed"
        array[:] = b"x" * len(array)
        if attempt_functions.attempt() == 0:
            raise ValueError("the first time")
        return len(array)

    assert list(mpwatch.run(change, 2, args=(bytearray(1 << 20),), max_restarts=1)) == [1 << 20] * 2


# --- the report of a run that fails every time


def test_the_error_names_what_happened_each_time():
    error = failed(attempt_functions.ends, 1, args=("kill", "exit", "raise"), max_restarts=2)
    verdict, *lines = str(error).splitlines()
    assert verdict.startswith("rank 0 failed first: ValueError: the third time (attempt_functions.py:")
    assert (lines[0], lines.pop()) == (
        "  restarted 2 times",
        "  not restarted again: all restarts are used up (max_restarts=2)",
    )
    starts = [
        r"    first start, [\d.]+ s: rank 0 was killed by SIGKILL \(not sent by mpwatch",
        r"    restart 1, [\d.]+ s: rank 0 ended with exit code 3 and no result",
        r"    restart 2, [\d.]+ s: rank 0 failed first: ValueError: the third time \(attempt_functions.py:",
    ]
    assert all(re.match(*pair) for pair in zip(starts, lines[1:], strict=True))
    result = error.result
    assert (result.restarts, len(result.attempts), result.state) == (2, 3, WorkerState.FAILED)
    assert [attempt.root_cause.kind.name for attempt in result.attempts] == ["SIGNAL", "EXIT", "EXCEPTION"]
    assert error.root_cause is result.attempts[-1].root_cause
    assert error.__cause__ is error.root_cause.exception
    assert (error.result.failures, result.return_values) == ({0: error.root_cause}, {})


def test_an_error_with_its_attempts_can_be_pickled():
    error = failed(attempt_functions.always_raises, 2, max_restarts=2)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert [event.name for event in again.result.events] == [event.name for event in error.result.events]
    assert [repr(attempt.root_cause.exception) for attempt in again.result.attempts] == [
        repr(attempt.root_cause.exception) for attempt in error.result.attempts
    ]
    assert again.result.root_cause is again.result.attempts[-1].root_cause


@pytest.mark.parametrize(
    ("fn", "args", "status"),
    [
        (attempt_functions.exits_with, (3, 4, 5), 5),
        (attempt_functions.ends, ("raise", "exit", "kill"), 137),
        (attempt_functions.exits_with, (3, 4, 0), None),
    ],
)
def test_a_program_exits_with_the_status_of_the_last_attempt(fn, args, status, capfd):
    if status is None:
        assert list(mpwatch.main(fn, 1, args=args, max_restarts=2)) == [None]
        return
    with pytest.raises(SystemExit) as caught:
        mpwatch.main(fn, 1, args=args, max_restarts=2)
    assert caught.value.code == status
    assert "restarted 2 times" in capfd.readouterr().err


def test_values_that_cannot_be_unpickled_are_no_reason_for_a_restart():
    """The watcher finds that out when all ranks have exited."""
    error = failed(
        attempt_functions.returns_in_the_second_attempt, 1, args=(attempt_functions.CannotBeUnpickled,), max_restarts=3
    )
    assert "LookupError: not here" in str(error)
    assert [attempt.state for attempt in error.result.attempts] == [WorkerState.FAILED] * 2
    assert error.result.restarts == 1
    assert error.result.notes == ("not restarted again: all ranks had returned, but a return value cannot be unpickled",)


def test_values_that_cannot_be_pickled_are_a_failure_of_the_rank():
    error = failed(
        attempt_functions.returns_in_the_second_attempt, 1, args=(attempt_functions.CannotBePickled,), max_restarts=3
    )
    assert [attempt.root_cause.kind for attempt in error.result.attempts] == [FailureKind.EXCEPTION] * 2
    assert "TypeError before the first heartbeat or report" in error.result.notes[0]


def test_check_false_returns_the_attempts():
    result = mpwatch.run(attempt_functions.always_raises, 2, max_restarts=1, check=False)
    assert (result.state, result.restarts, len(result.attempts)) == (WorkerState.FAILED, 1, 2)
    assert result.notes == ("not restarted again: all restarts are used up (max_restarts=1)",)
    table = result._repr_html_()
    assert "restarted once" in table
    assert result.notes[0] in table
    assert [table.count(f'left">{attempt}, ') for attempt in ("first start", "restart 1", "restart 2")] == [1, 1, 0]


def test_without_max_restarts_the_error_does_not_mention_restarts():
    error = failed(attempt_functions.always_raises, 1)
    assert "restart" not in str(error)
    assert (error.result.restarts, len(error.result.attempts), error.result.notes) == (0, 1, ())


# --- which failures


def test_programming_errors_are_restarted_only_after_a_heartbeat():
    error = failed(attempt_functions.always_raises, 1, args=(TypeError,), max_restarts=2)
    assert (error.result.restarts, "  not restarted: TypeError before" in str(error)) == (0, True)
    assert failed(attempt_functions.raises_after_a_heartbeat, 1, args=(TypeError,), max_restarts=2).result.restarts == 2


def test_a_heartbeat_of_an_earlier_attempt_does_not_count():
    def fn():
        if attempt_functions.attempt() == 0:
            mpwatch.report(step=1)
        raise TypeError("wrong")

    assert failed(fn, 1, max_restarts=5).result.restarts == 1


def test_retry_if_is_called_in_the_callers_thread_for_each_failure():
    import threading

    calls = []

    def retry_if(failure):
        calls.append((threading.current_thread(), failure.kind))
        return failure.kind is not FailureKind.EXCEPTION

    error = failed(
        attempt_functions.ends, 1, args=("kill", "exit", "raise"), max_restarts=RestartPolicy(9, retry_if=retry_if)
    )
    here = threading.current_thread()
    assert calls == [(here, FailureKind.SIGNAL), (here, FailureKind.EXIT), (here, FailureKind.EXCEPTION)]
    assert "`retry_if` does not allow a restart" in error.result.notes[0]


@pytest.mark.parametrize("scope", ["group", "worker"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_what_retry_if_raises_is_raised(scope, error):
    def retry_if(failure):
        raise error("in retry_if")

    events = []
    with pytest.raises(error, match="in retry_if") as caught:
        mpwatch.run(
            attempt_functions.fails,
            3,
            args=(1, 1),
            max_restarts=RestartPolicy(scope=scope, retry_if=retry_if),
            on_event=events.append,
        )
    notes = getattr(caught.value, "__notes__", ())
    assert len(notes) == (error is ZeroDivisionError)
    for note in notes:
        assert note.startswith("raised after ranks had failed:\n    first start, ")
        assert "rank 1 failed first: ValueError: attempt 0" in note
    expected = WorkerState.FAILED if error is ZeroDivisionError else WorkerState.STOPPED
    assert (events[-1].name, events[-1].state) == ("run_ended", expected)
    assert "in retry_if" in events[-1].reason


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_what_env_raises_at_a_restart_is_raised(scope):
    def env(worker):
        if worker.restart_count:
            raise LookupError(f"no room for rank {worker.rank}")
        return {}

    with pytest.raises(LookupError, match="no room for rank") as caught:
        mpwatch.run(attempt_functions.fails, 2, args=(1, 1), max_restarts=RestartPolicy(scope=scope), env=env)
    assert "rank 1 failed first" in caught.value.__notes__[0]


def test_what_env_returns_at_a_restart_is_checked():
    with pytest.raises(ValueError, match=r"what env\(\) returned may not set RANK: it"):
        mpwatch.run(
            attempt_functions.always_raises,
            1,
            max_restarts=1,
            env=lambda worker: {"RANK": "3"} if worker.restart_count else {},
        )


def test_no_progress_ends_the_run():
    policy = RestartPolicy(9, max_no_progress=2)
    error = failed(attempt_functions.reports, 1, args=(3, 5, 4, 5, 5), max_restarts=policy)
    assert len(error.result.attempts) == 4
    text = "no step beyond 5 was reported after 2 restarts in a row (max_no_progress=2)"
    assert error.result.notes == (f"not restarted again: {text}",)


# --- ranks that do not start


def test_failed_starts_are_restarted_only_with_retry_if():
    broken_env = {"PYTHONHOME": "/nonexistent"}
    error = failed(attempt_functions.describe_self, 2, max_restarts=2, env=broken_env)
    assert (error.result.restarts, error.root_cause.kind) == (0, FailureKind.START)
    error = failed(
        attempt_functions.describe_self, 2, max_restarts=RestartPolicy(2, retry_if={FailureKind.START}), env=broken_env
    )
    assert [attempt.root_cause.kind for attempt in error.result.attempts] == [FailureKind.START] * 3
    assert str(error).count("never started: its interpreter ended with exit code 1") >= 4


def test_ranks_that_start_in_the_third_attempt():
    def env(worker):
        return {"PYTHONHOME": "/nonexistent"} if worker.restart_count < 2 and worker.rank == 1 else {}

    result = mpwatch.run(attempt_functions.attempt, 2, max_restarts=RestartPolicy(2, retry_if=FailureKind.START), env=env)
    assert list(result) == [2, 2]
    assert [set(attempt.failures) for attempt in result.attempts] == [{1}, {1}, set()]


def test_the_error_names_a_rank_that_is_not_ready_after_a_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("MPWATCH_START_TIMEOUT", "3")
    (tmp_path / "sitecustomize.py").write_text("import signal\nwhile True: signal.pause()\n")

    def env(worker):
        path = os.environ.get("PYTHONPATH", "")
        return {"PYTHONPATH": f"{tmp_path}:{path}"} if worker.restart_count and worker.rank == 1 else {}

    error = failed(attempt_functions.fails, 2, args=(1, 0), max_restarts=5, env=env)
    root = error.root_cause
    assert (root.rank, root.kind, error.result.restarts) == (1, FailureKind.START, 1)
    assert str(error).startswith("rank 1 never started: ")
    assert "was not ready after 3 s" in str(error).splitlines()[0]
    assert "first start" in str(error)


# --- delays and the timeout


def test_restarts_come_after_their_delays():
    events = mpwatch.run(attempt_functions.fails, 1, args=(3, 0), max_restarts=RestartPolicy(3, delay=0.02, jitter=0)).events
    restartings, starts = of_kind(Restarting, events), of_kind(WorkerStarted, events)
    assert [event.delay for event in restartings] == [0.02, 0.04, 0.08]
    assert [event.restarts_left for event in restartings] == [2, 1, 0]
    for restarting, start in zip(restartings, starts[1:], strict=True):
        assert start.monotonic >= restarting.monotonic + restarting.delay


def test_the_timeout_is_for_all_attempts_together():
    error = failed(attempt_functions.waits_in_the_second_attempt, 2, timeout=1.5, max_restarts=9)
    assert isinstance(error, mpwatch.RunTimeoutError)
    assert str(error).startswith("the run did not end within timeout=1.5 s: ranks 0-1 had not returned")
    assert [attempt.state for attempt in error.result.attempts] == [WorkerState.FAILED] * 2
    assert "  restarted once" in str(error)


def test_no_restart_if_the_delay_is_longer_than_what_is_left_of_the_timeout():
    error = failed(attempt_functions.always_raises, 2, timeout=30, max_restarts=RestartPolicy(delay=30, jitter=0))
    assert not isinstance(error, mpwatch.RunTimeoutError)
    assert (error.result.restarts, "`timeout` leaves " in error.result.notes[0]) == (0, True)


# --- many restarts


def resident_megabytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def measure_this_process(seen):
    """Return a `retry_if` that measures this process: all ranks have exited when it is called."""

    def retry_if(failure):
        state = process_state.state()
        sizes = [len(state[what]) for what in ("children", "descriptors", "threads", "shared memory", "temporary files")]
        seen.append((*sizes, resident_megabytes()))
        return True

    return retry_if


@pytest.mark.slow
def test_many_restarts_leak_nothing():
    """The check after each test finds any other leak."""
    seen = []
    policy = RestartPolicy(process_state.RUNS, retry_if=measure_this_process(seen))
    result = mpwatch.run(attempt_functions.fails, 2, args=(process_state.RUNS, 1), max_restarts=policy)
    assert [attempt for attempt, *_ in result] == [process_state.RUNS] * 2
    assert len({tuple(sample[:-1]) for sample in seen}) == 1
    assert seen[-1][-1] - seen[20][-1] < 4
    assert len(of_kind(WorkerExited, result.events)) == 2 * (process_state.RUNS + 1)


@pytest.mark.slow
def test_restarts_of_single_ranks_leak_nothing():
    seen = []
    policy = RestartPolicy(41, scope="worker", retry_if=measure_this_process(seen))
    result = mpwatch.run(attempt_functions.raises_by_itself, 2, args=(40,), max_restarts=policy)
    assert (list(result), result.restarts) == ([40, 41], 81)
    for n in range(
        len(seen[0]) - 1
    ):  # the other rank may run or not, which makes a small difference; a leak would be sixty by then
        assert max(sample[n] for sample in seen[-20:]) < min(sample[n] for sample in seen[:20]) + 10
    assert seen[-1][-1] - seen[20][-1] < 4
