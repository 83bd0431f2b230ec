"""Views of real runs: which statuses they receive, when, and what happens if a view raises. None of these views draws."""

import logging
from functools import partial

import pytest

import mpwatch
from live_view import reporting_functions
from mpwatch import WorkerState
from mpwatch.os_support.processes import read_process_usage
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.host_signals import HostSignals
from mpwatch.watcher.processes.guardian import Guardian
from support import failing, functions
from support.process_state import SPAWN
from support.programs import TESTS, python
from watcher.restarts import attempt_functions


class RecordingView:
    """A view that records all statuses and asks for new ones without delay. It calls `then` once, when the condition holds."""

    period = 0.0
    terminal_restore = None

    def __init__(self, condition=lambda statuses: False, then=lambda: None):
        self.seen, self.ends = [], []
        self._condition, self._then = condition, then
        self._has_fired = False

    def show(self, statuses):
        self.seen.append(statuses)
        if not self._has_fired and self._condition(statuses):
            self._has_fired = True
            self._then()

    def close(self, statuses):
        self.ends.append(list(statuses))

    def states(self):
        """Return the states of all ranks, one tuple for each change."""
        found = [tuple(status.state.name for status in statuses) for statuses in [*self.seen, *self.ends]]
        return [states for n, states in enumerate(found) if n == 0 or states != found[n - 1]]


@pytest.fixture(scope="module")
def _event():
    return SPAWN.Event()  # its semaphores live longer than a test


@pytest.fixture
def event(_event):
    _event.clear()
    return _event


@pytest.fixture
def view(monkeypatch):
    """Return a function that makes the next calls use these views."""

    def use(*views):
        waiting = list(views)
        for module in ("api", "group"):
            monkeypatch.setattr(f"mpwatch.{module}.select_view", lambda progress: waiting.pop(0))
        return views[0]

    return use


def reported_steps(*steps):
    return lambda statuses: [status.report and status.report.step for status in statuses] == list(steps)


def test_statuses_of_a_run(view, event):
    recorder = view(RecordingView(reported_steps(1, 2), event.set))
    mpwatch.run(reporting_functions.report_one_step_and_wait, 2, args=(event,), kwargs={"loss": 0.5})
    first, last = next(seen for seen in recorder.seen if reported_steps(1, 2)(seen)), recorder.ends[-1]
    assert len(recorder.ends) == 1
    assert recorder.states()[-1] == ("SUCCEEDED", "SUCCEEDED")
    assert {*recorder.states()[0]} <= {"INIT", "HEALTHY"}
    for rank, (running, ended) in enumerate(zip(first, last, strict=True)):
        assert (running.rank, running.local_rank, running.state) == (rank, rank, WorkerState.HEALTHY)
        assert (running.report.total, running.report.metrics) == (10, {"loss": 0.5})
        assert running.report.at <= running.heartbeat_at <= running.seen_at
        assert running.memory > 1_000_000
        assert running.cpu_seconds > 0
        assert (ended.state, ended.report.step, ended.heartbeat_at) == (WorkerState.SUCCEEDED, 10, None)
        assert ended.pid == running.pid


def test_a_failure(view, event):
    recorder = view(RecordingView(reported_steps(1, 1), event.set))
    with pytest.raises(mpwatch.RunFailedError):
        mpwatch.run(reporting_functions.raise_after_event, 2, args=(event,))
    assert recorder.states()[-1] == ("STOPPED", "FAILED")


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_a_restart(view, event, scope):
    recorder = view(RecordingView(reported_steps(5, 5), event.set))
    policy = mpwatch.RestartPolicy(2, scope=scope, delay=0)
    mpwatch.run(reporting_functions.die_once_after_event, 2, args=(event,), max_restarts=policy)
    last = recorder.ends[-1]
    assert [status.state for status in last] == [WorkerState.SUCCEEDED] * 2
    assert [(status.restart_count, status.report.step) for status in last] == [(1, 6), (1, 6)]


def test_a_late_heartbeat(view, event):
    recorder = view(RecordingView(lambda statuses: statuses[0].state is WorkerState.UNHEALTHY, event.set))
    mpwatch.run(reporting_functions.be_silent_until_event, 1, args=(event,), heartbeat_timeout=1.0)
    assert ("UNHEALTHY",) in recorder.states()


def test_a_group_has_a_view_for_each_call(view, event):
    recorders = [RecordingView(reported_steps(1, 2), event.set), RecordingView(lambda statuses: True, event.set)]
    view(*recorders)
    with mpwatch.WorkerGroup(2) as group:
        group.run(reporting_functions.report_one_step_and_wait, (event,))
        event.clear()
        group.run(reporting_functions.be_silent_until_event, (event,))
    assert [status.report.step for status in recorders[0].ends[-1]] == [10, 10]
    assert recorders[0].states()[-1] == recorders[1].states()[-1] == ("SUCCEEDED", "SUCCEEDED")
    assert {status.report for statuses in recorders[1].seen for status in statuses} == {None}


class ViewWithReservedRows(RecordingView):
    """A view that reserves rows of a terminal from its first drawing until it is closed."""

    @property
    def terminal_restore(self):
        return ("/dev/null", b"") if self.seen and not self.ends else None


def test_the_guardian_knows_how_to_restore_the_terminal(view, event, monkeypatch):
    restores = []
    monkeypatch.setattr(Guardian, "set_terminal_restore", lambda self, terminal_restore: restores.append(terminal_restore))
    view(ViewWithReservedRows(lambda statuses: True, event.set))
    with mpwatch.WorkerGroup(2) as group:
        group.run(reporting_functions.be_silent_until_event, (event,))
    assert restores == [("/dev/null", b""), None]


def test_a_very_short_call_has_no_view(view, monkeypatch, caplog):
    monkeypatch.setattr("mpwatch.watcher.run.QUICK_CALL_SECONDS", 60.0)
    unused = view(RecordingView())
    with mpwatch.WorkerGroup(2) as group:
        assert [list(group.run(functions.rank)) for _ in range(3)] == [[0, 1]] * 3
    assert (unused.seen, unused.ends, caplog.records) == ([], [], [])


class RaisingView(RecordingView):
    def __init__(self, where, error=ZeroDivisionError, **more):
        super().__init__(**more)
        self._where, self._error = where, error

    def _raise_at(self, where):
        if where == self._where:
            raise self._error("in the view")

    @property
    def period(self):
        self._raise_at("period")
        return 0.0

    def show(self, statuses):
        super().show(statuses)
        self._raise_at("show")

    def close(self, statuses):
        super().close(statuses)
        self._raise_at("close")


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
@pytest.mark.parametrize("where", ["period", "show", "close"])
def test_a_view_that_raises_is_logged_and_dropped(view, event, caplog, where, error):
    recorder = view(RaisingView(where, error, condition=lambda statuses: True, then=event.set))
    if where == "period":
        event.set()
    result = mpwatch.run(reporting_functions.report_one_step_and_wait, 2, args=(event,))
    assert list(result) == [0, 1]
    (record,) = caplog.records
    assert (record.levelno, record.exc_info[0]) == (logging.WARNING, error)
    assert record.message == "the live view failed; the run goes on without it"
    assert len(recorder.seen) == {"period": 0, "show": 1}.get(where, len(recorder.seen))
    assert recorder.ends[-1] == []


def test_a_view_that_cannot_be_made(monkeypatch, caplog):
    monkeypatch.setattr("mpwatch.api.select_view", lambda progress: 1 / 0)
    assert list(mpwatch.run(functions.rank, 2)) == [0, 1]
    assert "the live view failed" in caplog.text


@pytest.mark.parametrize("where", ["period", "show", "close"])
def test_a_keyboard_interrupt_in_a_view_is_raised_by_the_run(view, event, where):
    recorder = view(RaisingView(where, KeyboardInterrupt, condition=lambda statuses: True, then=event.set))
    if where == "period":
        event.set()
    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(reporting_functions.report_one_step_and_wait, 2, args=(event,), grace_period=5)
    assert where == "period" or recorder.ends
    # an interrupted view is not shown anything more: it would interrupt the end of the run, too
    assert len(recorder.seen) <= 1 or where == "close"


def test_a_view_is_closed_when_an_observer_is_interrupted(view):
    recorder = view(RecordingView())

    def interrupt(event):
        if event.name == "worker_ready":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(failing.wait_to_be_stopped, 2, on_event=interrupt, grace_period=5)
    assert len(recorder.ends) == 1


@pytest.mark.parametrize("progress", [0, "yes", 1.5])
def test_the_option_is_checked(progress):
    for make in (lambda **options: mpwatch.run(functions.rank, 1, **options), partial(mpwatch.WorkerGroup, 1)):
        with pytest.raises(TypeError, match="progress must be True, False or None, not"):
            make(progress=progress)


def test_main_passes_the_option_on(view):
    recorder = view(RecordingView())
    assert isinstance(mpwatch.main(functions.rank, 2, progress=True), RunResult)
    assert len(recorder.ends) == 1


def test_usage_of_a_process_that_does_not_exist():
    assert read_process_usage(1 << 30) is None


@pytest.mark.parametrize(
    ("progress", "expected"),
    [("None", []), ("False", []), ("True", ["mpwatch: step 8 of 8 (100 %); loss 0.25; 2 ranks returned"])],
)
def test_lines_in_a_pipe_only_if_requested(progress, expected):
    done = python(
        str(TESTS / "live_view" / "view_program.py"),
        "report_and_wait_for_fifo",
        "2",
        "/dev/null",
        "3",
        f"progress={progress}",
    )
    assert done.stdout == "before\nafter None None\n"
    assert done.stderr.splitlines()[-1:] == expected
    assert all(line.startswith("mpwatch: ") for line in done.stderr.splitlines())


def test_without_a_view_the_caller_does_not_wake_up(monkeypatch):
    slept = []
    sleep = HostSignals.wait_for_wakeup

    def wait_for_wakeup(signals, seconds, others):
        slept.append((seconds, *others))
        sleep(signals, seconds, others)

    monkeypatch.setattr(HostSignals, "wait_for_wakeup", wait_for_wakeup)
    mpwatch.run(reporting_functions.report_and_wait_for_fifo, 2, args=("/dev/null", 1))
    assert slept
    assert set(slept) == {(None,)}


def test_a_returned_rank_is_not_shown_as_failed_during_the_restart_delay(view, event):
    recorder = view(RecordingView(lambda statuses: statuses[0].state is WorkerState.SUCCEEDED, event.set))
    mpwatch.run(
        attempt_functions.rank_0_returns_before_rank_1_fails,
        2,
        args=(event,),
        max_restarts=mpwatch.RestartPolicy(1, delay=0.2),
    )
    states = recorder.states()
    assert ("SUCCEEDED", "FAILED") in states
    assert "FAILED" not in {first for first, _ in states}
