"""Views of real runs: what they are told of the ranks, when, and what becomes of those that fail. None of them draws."""

import logging

import functions
import pytest
import reborn
import reporting
import saboteurs
from conftest import SPAWN
from programs import HERE, python

import mpwatch
from mpwatch import WorkerState
from mpwatch.os_support.processes import usage_of_process
from mpwatch.results.run_result import RunResult
from mpwatch.watcher.host_signals import HostSignals
from mpwatch.watcher.processes.guardian import Guardian


class Watcher:
    """A view that looks as often as it can, and does something once it has seen enough."""

    period = 0.0
    repair = None

    def __init__(self, is_enough=lambda statuses: False, do=lambda: None):
        self.seen, self.ends = [], []
        self._is_enough, self._do = is_enough, do
        self._was_enough = False

    def show(self, statuses):
        self.seen.append(statuses)
        if not self._was_enough and self._is_enough(statuses):
            self._was_enough = True
            self._do()

    def close(self, statuses):
        self.ends.append(list(statuses))

    def states(self):
        """Of all ranks, one after another, each once in a row."""
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
    """Have this view made for the next call."""

    def use(*views):
        waiting = list(views)
        for module in ("api", "group"):
            monkeypatch.setattr(f"mpwatch.{module}.view_for", lambda progress: waiting.pop(0))
        return views[0]

    return use


def have_reported(*steps):
    return lambda statuses: [status.report and status.report.step for status in statuses] == list(steps)


def test_how_ranks_fare(view, event):
    watcher = view(Watcher(have_reported(1, 2), event.set))
    mpwatch.run(reporting.one_step_then_wait, 2, args=(event,), kwargs={"loss": 0.5})
    first, last = next(seen for seen in watcher.seen if have_reported(1, 2)(seen)), watcher.ends[-1]
    assert len(watcher.ends) == 1
    assert watcher.states()[-1] == ("SUCCEEDED", "SUCCEEDED")
    assert {*watcher.states()[0]} <= {"INIT", "HEALTHY"}
    for rank, (at_work, ended) in enumerate(zip(first, last, strict=True)):
        assert (at_work.rank, at_work.local_rank, at_work.state) == (rank, rank, WorkerState.HEALTHY)
        assert (at_work.report.total, at_work.report.metrics) == (10, {"loss": 0.5})
        assert at_work.report.at <= at_work.heartbeat_at <= at_work.seen_at
        assert at_work.memory > 1_000_000
        assert at_work.cpu_seconds > 0
        assert (ended.state, ended.report.step, ended.heartbeat_at) == (WorkerState.SUCCEEDED, 10, None)
        assert ended.pid == at_work.pid


def test_a_failure(view, event):
    watcher = view(Watcher(have_reported(1, 1), event.set))
    with pytest.raises(mpwatch.RunFailedError):
        mpwatch.run(reporting.raises_when_seen, 2, args=(event,))
    assert watcher.states()[-1] == ("STOPPED", "FAILED")


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_a_restart(view, event, scope):
    watcher = view(Watcher(have_reported(5, 5), event.set))
    policy = mpwatch.RestartPolicy(2, scope=scope, delay=0)
    mpwatch.run(reporting.dies_once_when_seen, 2, args=(event,), restart_policy=policy)
    last = watcher.ends[-1]
    assert [status.state for status in last] == [WorkerState.SUCCEEDED] * 2
    assert [(status.restart_count, status.report.step) for status in last] == [(1, 6), (1, 6)]


def test_a_rank_that_is_late(view, event):
    watcher = view(Watcher(lambda statuses: statuses[0].state is WorkerState.UNHEALTHY, event.set))
    mpwatch.run(reporting.is_silent_until_seen, 1, args=(event,), heartbeat_timeout=1.0)
    assert ("UNHEALTHY",) in watcher.states()


def test_a_group_has_a_view_for_each_call(view, event):
    watchers = [Watcher(have_reported(1, 2), event.set), Watcher(lambda statuses: True, event.set)]
    view(*watchers)
    with mpwatch.WorkerGroup(2) as group:
        group.run(reporting.one_step_then_wait, (event,))
        event.clear()
        group.run(reporting.is_silent_until_seen, (event,))
    assert [status.report.step for status in watchers[0].ends[-1]] == [10, 10]
    assert watchers[0].states()[-1] == watchers[1].states()[-1] == ("SUCCEEDED", "SUCCEEDED")
    assert {status.report for statuses in watchers[1].seen for status in statuses} == {None}


class Keeper(Watcher):
    """Keeps rows of a terminal, as long as it is there."""

    @property
    def repair(self):
        return ("/dev/null", b"") if self.seen and not self.ends else None


def test_what_a_view_keeps_is_entrusted_to_the_guardian_as_long_as_it_does(view, event, monkeypatch):
    told = []
    monkeypatch.setattr(Guardian, "entrust", lambda self, repair: told.append(repair))
    view(Keeper(lambda statuses: True, event.set))
    with mpwatch.WorkerGroup(2) as group:
        group.run(reporting.is_silent_until_seen, (event,))
    assert told == [("/dev/null", b""), None]


def test_a_call_that_is_over_in_a_moment_has_none(view, monkeypatch, caplog):
    monkeypatch.setattr("mpwatch.watcher.run.MOMENT_SECONDS", 60.0)
    unused = view(Watcher())
    with mpwatch.WorkerGroup(2) as group:
        assert [list(group.run(functions.rank)) for _ in range(3)] == [[0, 1]] * 3
    assert (unused.seen, unused.ends, caplog.records) == ([], [], [])


class Broken(Watcher):
    def __init__(self, where, error=ZeroDivisionError, **more):
        super().__init__(**more)
        self._where, self._error = where, error

    def _reach(self, where):
        if where == self._where:
            raise self._error("in the view")

    @property
    def period(self):
        self._reach("period")
        return 0.0

    def show(self, statuses):
        super().show(statuses)
        self._reach("show")

    def close(self, statuses):
        super().close(statuses)
        self._reach("close")


@pytest.mark.parametrize("where", ["period", "show", "close"])
def test_a_view_that_raises_is_logged_and_dropped(view, event, caplog, where):
    watcher = view(Broken(where, is_enough=lambda statuses: True, do=event.set))
    if where == "period":
        event.set()
    result = mpwatch.run(reporting.one_step_then_wait, 2, args=(event,))
    assert list(result) == [0, 1]
    (record,) = caplog.records
    assert (record.levelno, record.exc_info[0]) == (logging.WARNING, ZeroDivisionError)
    assert record.message == "the live view has failed; the run goes on without it"
    assert len(watcher.seen) == {"period": 0, "show": 1}.get(where, len(watcher.seen))
    assert watcher.ends[-1] == []


def test_a_view_that_cannot_be_made(monkeypatch, caplog):
    monkeypatch.setattr("mpwatch.api.view_for", lambda progress: 1 / 0)
    assert list(mpwatch.run(functions.rank, 2)) == [0, 1]
    assert "the live view has failed" in caplog.text


@pytest.mark.parametrize("where", ["period", "show", "close"])
def test_what_it_throws_comes_out_of_the_run(view, event, where):
    watcher = view(Broken(where, KeyboardInterrupt, is_enough=lambda statuses: True, do=event.set))
    if where == "period":
        event.set()
    with pytest.raises(KeyboardInterrupt):
        mpwatch.run(reporting.one_step_then_wait, 2, args=(event,), grace_period=5)
    assert where == "period" or watcher.ends


def test_a_view_is_closed_when_something_is_thrown_at_the_caller(view):
    watcher = view(Watcher())

    def throws(event):
        if event.name == "worker_ready":
            raise SystemExit

    with pytest.raises(SystemExit):
        mpwatch.run(saboteurs.wait_to_be_stopped, 2, on_event=throws, grace_period=5)
    assert len(watcher.ends) == 1


@pytest.mark.parametrize("progress", [0, "yes", 1.5])
def test_the_option_is_checked(progress):
    for make in (lambda **options: mpwatch.run(functions.rank, 1, **options), mpwatch.WorkerGroup):
        with pytest.raises(TypeError, match="progress must be True, False or None, not"):
            make(progress=progress)


def test_main_passes_it_on(view):
    watcher = view(Watcher())
    assert isinstance(mpwatch.main(functions.rank, 2, progress=True), RunResult)
    assert len(watcher.ends) == 1


def test_a_process_that_is_not_there_uses_nothing():
    assert usage_of_process(1 << 30) is None


@pytest.mark.parametrize(
    ("progress", "told"),
    [("None", []), ("False", []), ("True", ["mpwatch: step 8 of 8 (100 %); loss 0.25; 2 ranks returned"])],
)
def test_in_a_pipe_there_are_lines_if_they_are_wanted(progress, told):
    done = python(str(HERE / "watched.py"), "waits_at_the_gate", "2", "/dev/null", "3", f"progress={progress}")
    assert done.stdout == "before\nafter None None\n"
    assert done.stderr.splitlines()[-1:] == told
    assert all(line.startswith("mpwatch: ") for line in done.stderr.splitlines())


def test_nobody_wakes_up_where_nothing_is_shown(monkeypatch):
    slept = []
    sleep = HostSignals.sleep
    monkeypatch.setattr(HostSignals, "sleep", lambda self, seconds=None: (slept.append(seconds), sleep(self, seconds)))
    mpwatch.run(reporting.waits_at_the_gate, 2, args=("/dev/null", 1))
    assert slept
    assert set(slept) == {None}


def test_who_had_returned_is_not_taken_for_failed_while_all_wait_to_be_started_again(view, event):
    watcher = view(Watcher(lambda statuses: statuses[0].state is WorkerState.SUCCEEDED, event.set))
    mpwatch.run(
        reborn.one_returns_before_the_other_fails, 2, args=(event,), restart_policy=mpwatch.RestartPolicy(1, delay=0.2)
    )
    states = watcher.states()
    assert ("SUCCEEDED", "FAILED") in states
    assert "FAILED" not in {first for first, _ in states}
