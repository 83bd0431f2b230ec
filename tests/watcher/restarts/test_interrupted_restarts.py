"""Events between a failure and the restart: signals, lack of descriptors, second failures. With real processes."""

import os
import signal
import time

import pytest

import mpwatch
from mpwatch import FailureKind, RestartPolicy, WorkerState
from mpwatch.events import Restarting, WorkerStarted
from support import one_run
from support.process_state import SPAWN
from support.programs import ENV, python
from watcher.restarts import attempt_functions

LONG = 1000.0  # seconds; no test waits so long


def delay_restart(scope="group", **more):
    return RestartPolicy(9, scope=scope, delay=LONG, max_delay=LONG, **more)


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def at_restart(do):
    """Return an observer that calls `do` at the first Restarting event: single ranks may be restarted at the same time."""
    seen = []

    def observe(event):
        if isinstance(event, Restarting) and not seen:
            seen.append(event)
            do()

    return observe


def interrupt():
    signal.raise_signal(signal.SIGINT)


# --- signals


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_ctrl_c_during_the_delay_ends_the_run_at_once(scope):
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        mpwatch.run(attempt_functions.always_raises, 2, max_restarts=delay_restart(scope), on_event=at_restart(interrupt))
    assert time.monotonic() - start < 60
    failed = caught.value.__cause__
    assert isinstance(failed, mpwatch.RunFailedError)
    assert failed.__cause__ is failed.root_cause.exception
    assert "  not restarted: this process received a signal" in str(failed)
    assert failed.result.state is WorkerState.FAILED
    assert failed.result.events[-1].reason.startswith("rank ")


def test_ctrl_c_during_retry_if_ends_the_run():
    """The handler does not raise in code of the user."""
    done = []

    def retry_if(failure):
        interrupt()
        done.append(failure)
        return True

    with pytest.raises(KeyboardInterrupt) as caught:
        mpwatch.run(attempt_functions.always_raises, 2, max_restarts=RestartPolicy(retry_if=retry_if))
    assert len(done) == 1
    assert "rank" in str(caught.value.__cause__)
    assert len(of_kind(WorkerStarted, caught.value.__cause__.result.events)) == 2


def test_a_second_ctrl_c_ends_retry_if():
    """`retry_if` may wait for an answer that never comes."""
    steps = []

    def retry_if(failure):
        interrupt()
        steps.append(failure)
        interrupt()
        steps.append(failure)

    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(attempt_functions.always_raises, 2, max_restarts=RestartPolicy(retry_if=retry_if))
    assert len(steps) == 1


@pytest.mark.parametrize("kind", [WorkerStarted, Restarting])
def test_a_second_ctrl_c_ends_an_observer(kind):
    steps = []

    def observe(event):
        if isinstance(event, kind) and not steps:
            interrupt()
            steps.append(event)
            interrupt()
            steps.append(event)

    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(attempt_functions.always_raises, 2, max_restarts=3, on_event=observe)
    assert len(steps) == 1


def test_ctrl_c_in_a_later_attempt_ends_the_run():
    def observe(event):
        if isinstance(event, WorkerStarted) and event.attempt == 2:
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(attempt_functions.fails, 2, args=(5, 1), max_restarts=9, on_event=observe)


def test_a_host_that_ignores_the_interrupt_gets_the_failure():
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with pytest.raises(mpwatch.RunFailedError, match="this process received a signal"):
            mpwatch.run(attempt_functions.always_raises, 2, max_restarts=delay_restart(), on_event=at_restart(interrupt))
    finally:
        signal.signal(signal.SIGINT, handler)


def test_what_a_handler_of_the_host_raises_during_the_delay_is_raised():
    def handle(*_):
        raise LookupError("of the host's")

    handler = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(LookupError, match="of the host's"):
            mpwatch.run(
                attempt_functions.always_raises,
                2,
                max_restarts=delay_restart(),
                on_event=at_restart(lambda: signal.raise_signal(signal.SIGUSR1)),
            )
    finally:
        signal.signal(signal.SIGUSR1, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_delay_reaches_its_handler(number):
    program = (
        "import os, signal, sys, mpwatch\n"
        "from watcher.restarts import attempt_functions\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "def observe(event):\n"
        "    if event.name == 'restarting': os.kill(os.getpid(), int(sys.argv[1]))\n"
        "    if event.name == 'run_ended': print(event.state.name, event.restarts, flush=True)\n"
        "policy = mpwatch.RestartPolicy(9, delay=1000, max_delay=1000)\n"
        "mpwatch.run(attempt_functions.always_raises, 2, max_restarts=policy, on_event=observe)\n"
    )
    done = python("-c", program, str(int(number)), check=False, env=ENV)
    assert (done.returncode, done.stdout) == (-number, "FAILED 0\n")
    assert done.stderr.endswith("KeyboardInterrupt\n" if number == signal.SIGINT else "")


def test_restarts_work_outside_the_main_thread():
    import threading

    results = []
    thread = threading.Thread(
        target=lambda: results.append(mpwatch.run(attempt_functions.fails, 2, args=(2, 1), max_restarts=2))
    )
    thread.start()
    thread.join()
    assert [attempt for attempt, *_ in results[0]] == [2, 2]


# --- failures before the restart


def test_a_second_failure_while_others_are_stopped_causes_no_second_restart():
    barrier = SPAWN.Barrier(2)
    result = mpwatch.run(attempt_functions.raises_when_stopped, 2, args=(barrier,), max_restarts=9)
    assert (list(result), result.restarts) == ([1, 1], 1)
    root = result.attempts[0].root_cause
    assert (root.rank, repr(root.exception)) == (1, "ValueError('the first')")


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "raise SystemExit('no licence')"])
def test_a_failure_while_ranks_are_restarted(tmp_path, how):
    (tmp_path / "sitecustomize.py").write_text(f"import os\n{how}\n")

    def env(worker):
        path = os.environ.get("PYTHONPATH", "")
        return {"PYTHONPATH": f"{tmp_path}:{path}"} if (worker.restart_count, worker.rank) == (1, 0) else {}

    policy = RestartPolicy(3, retry_if=[ValueError, FailureKind.START])
    result = mpwatch.run(attempt_functions.fails, 2, args=(1, 1), max_restarts=policy, env=env)
    assert [attempt for attempt, *_ in result] == [2, 2]
    assert [attempt.root_cause and attempt.root_cause.kind for attempt in result.attempts] == [
        FailureKind.EXCEPTION,
        FailureKind.START,
        None,
    ]
    assert result.attempts[1].root_cause.rank == 0


def test_an_interpreter_that_is_suspended_at_a_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("MPWATCH_START_TIMEOUT", "2")
    (tmp_path / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")

    def env(worker):
        path = os.environ.get("PYTHONPATH", "")
        return {"PYTHONPATH": f"{tmp_path}:{path}"} if (worker.restart_count, worker.rank) == (1, 0) else {}

    with pytest.raises(mpwatch.RunFailedError, match="rank 0 never started: its interpreter was not ready after 2 s"):
        mpwatch.run(attempt_functions.fails, 2, args=(1, 1), max_restarts=3, env=env)


# --- ranks that cannot be started


def test_a_restart_that_fails_for_lack_of_descriptors():
    """The error is the same wherever the descriptor is needed."""
    for spare in range(0, 20, 4):
        relief = []

        def retry_if(failure, spare=spare, relief=relief):
            if not relief:
                relief.append(one_run.leave_descriptors(spare))
            return True

        events = []
        try:
            with pytest.raises(mpwatch.LaunchError, match="Too many open files") as caught:
                mpwatch.run(
                    attempt_functions.fails,
                    16,
                    args=(1, 1),
                    max_restarts=RestartPolicy(retry_if=retry_if),
                    on_event=events.append,
                )
        finally:
            relief[0]()
        note = caught.value.__notes__[-1].splitlines()
        assert note[0] == "raised after ranks had failed:"
        assert "rank 1 failed first: ValueError: attempt 0" in note[1]
        assert (events[-1].name, events[-1].state) == ("run_ended", WorkerState.FAILED)
        assert "Too many open files" in events[-1].reason


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_an_environment_that_is_too_large_at_the_restart(scope):
    events = []
    with pytest.raises(mpwatch.LaunchError, match=r"rank . could not be started: .*Argument list too long") as caught:
        mpwatch.run(
            attempt_functions.fails,
            3,
            args=(1, 1),
            max_restarts=RestartPolicy(scope=scope),
            env=lambda worker: {"LARGE": "x" * (1 << 20)} if worker.restart_count else {},
            on_event=events.append,
        )
    (note,) = caught.value.__notes__
    assert note.startswith("raised after ranks had failed:\n    first start, ")
    names = [event.name for event in events if event.name != "worker_ready"]  # another rank may still be starting
    assert names[-3:] == ["restarting", "state_changed", "run_ended"]
