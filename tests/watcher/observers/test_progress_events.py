"""Progressed: the reports of the ranks while they run, for the functions of the option `on_progress`."""

import threading

import mpwatch
from mpwatch.events import Progressed
from support.process_state import SPAWN
from support.programs import TESTS, python


def report_steps(go_on):
    """Report a step, and wait until the caller has seen it, three times."""
    for step in (1, 2, 3):
        mpwatch.report(step=step, total=3, loss=step / 4)
        assert go_on[step - 1].wait(60)


def report_often():
    for step in range(1000):
        mpwatch.report(step=step)


def test_on_progress_sees_each_report_while_the_ranks_run():
    go_on = [SPAWN.Event() for _ in range(3)]
    seen, others, threads = [], [], set()

    def record(event):
        threads.add(threading.current_thread())
        seen.append((event.ranks, event.step, event.total, dict(event.metrics)))
        if sum(step == event.step for _, step, _, _ in seen) == 2:
            go_on[event.step - 1].set()

    result = mpwatch.run(report_steps, 2, args=(go_on,), on_progress=record, on_event=others.append)
    expected = [((rank,), step, 3, {"loss": step / 4}) for rank in (0, 1) for step in (1, 2, 3)]
    assert sorted(seen, key=str) == expected
    assert threads == {threading.current_thread()}
    for events in (others, result.events):
        assert events
        assert not any(isinstance(event, Progressed) for event in events)


def test_the_last_report_of_a_short_call_is_not_lost():
    seen = []
    mpwatch.run(report_often, 2, on_progress=seen.append)
    steps = [event.step for event in seen]
    assert steps.count(999) == 2
    assert len(steps) < 20
    assert seen[0].to_dict()["event"] == "progressed"


def test_the_example_shows_one_bar_for_all_ranks():
    done = python(str(TESTS.parent / "examples" / "progress_observers.py"))
    assert "100%" in done.stderr
    assert "40/40" in done.stderr
