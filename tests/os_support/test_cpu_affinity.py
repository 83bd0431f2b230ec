"""The affinity of a thread, and the text for a set of CPUs."""

import os
import threading

import pytest

from mpwatch.os_support.cpu_affinity import format_cpus, get_allowed_cpus, limit_thread_to
from support.programs import python


@pytest.mark.parametrize(
    ("cpus", "text"),
    [
        ((), "no CPU"),
        ([3], "CPU 3"),
        ({4, 5}, "CPUs 4-5"),
        ((0, 2), "CPUs 0, 2"),
        (iter([9, 1, 0, 8, 3]), "CPUs 0-1, 3, 8-9"),
    ],
)
def test_the_text_for_cpus(cpus, text):
    assert format_cpus(cpus) == text


def test_a_thread_is_limited_for_a_while():
    before = os.sched_getaffinity(0)
    with limit_thread_to({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    with limit_thread_to(None):
        assert os.sched_getaffinity(0) == before


def test_an_exception_restores_the_affinity():
    before = os.sched_getaffinity(0)
    with pytest.raises(KeyboardInterrupt), limit_thread_to({max(before)}):
        raise KeyboardInterrupt
    assert os.sched_getaffinity(0) == before


def test_cpus_that_do_not_exist_change_nothing():
    before = os.sched_getaffinity(0)
    with pytest.raises(OSError, match="it cannot run on CPU 1023: Invalid argument"), limit_thread_to({1023}):
        pytest.fail("the block was entered")
    assert os.sched_getaffinity(0) == before


def test_other_threads_are_not_limited():
    allowed = os.sched_getaffinity(0)
    affinities = []

    def other():
        begin.wait()
        affinities.append(os.sched_getaffinity(0))

    begin = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    with limit_thread_to({min(allowed)}):
        begin.set()
        thread.join()
    assert affinities == [allowed]


def test_a_process_that_is_started_meanwhile_is_limited():
    cpu = max(os.sched_getaffinity(0))
    with limit_thread_to({cpu}):
        assert python("-c", "import os; print(os.sched_getaffinity(0))").stdout == f"{{{cpu}}}\n"


def test_the_allowed_cpus_are_those_of_this_thread():
    assert get_allowed_cpus() == os.sched_getaffinity(0)
