"""CollectiveMonitor: when it warns, and when it ends a call. With a clock that the test sets, and without processes."""

from types import SimpleNamespace

import pytest

from mpwatch.results.collective import Collective, CollectiveState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.observers.collective_monitor import MIN_CHECK_SECONDS, CollectiveMonitor
from mpwatch.wire.messages import MessageKind

WORLD = tuple(range(3))


def call(sequence, state=CollectiveState.COMPLETED, name="barrier", seconds=0.0, **details):
    return Collective(name=name, sequence=sequence, group="default", ranks=WORLD, state=state, seconds=seconds, **details)


class Ranks:
    """Ranks that answer at once, and the monitor that asks them. `calls` has what each rank has called, and when."""

    def __init__(self, stall_after=60.0, *, is_multi_node=False, may_call_again=False):
        self.now = 1000.0
        self.calls = [[] for _ in WORLD]
        self.returned = set()
        self.actions, self.warnings, self.ends, self.stalls = [], [], [], []
        self.is_mute = False
        self.place = ""  # where the main threads wait, if they do
        self.pool = SimpleNamespace(handles={})
        self.monitor = CollectiveMonitor(
            self.list_handles,
            stall_after,
            SimpleNamespace(warning=lambda _, text: self.warnings.append(text)),
            is_called=lambda rank: True,
            is_checking=lambda: True,
            call_at=lambda at, action: self.actions.append((at, action)),
            end_call=self.ends.append,
            on_stall=(lambda answers, returned: self.stalls.append((answers, returned))) if is_multi_node else None,
            may_call_again=may_call_again,
            clock=lambda: self.now,
        )
        self.start()

    def list_handles(self):
        return self.pool.handles.values()

    def start(self):
        """Begin an attempt with new processes."""
        self.pool.handles = {
            rank: SimpleNamespaceHandle(
                collective_sockets=SimpleNamespace(is_open=True, ask=lambda: True),
                observations=SimpleNamespace(worker=SimpleNamespace(rank=rank), answer=None),
            )
            for rank in WORLD
        }
        self.monitor.begin_call()
        self.monitor.start()

    def wait_in(self, sequence, *ranks, name="barrier"):
        for rank in ranks:
            self.calls[rank].append((sequence, name, self.now))

    def answer(self, rank):
        """Let a rank answer: it waits in its last collective."""
        answer = RankCollectives(
            collectives=tuple(
                call(number, CollectiveState.WAITING, name, self.now - at, place=self.place)
                for number, name, at in self.calls[rank][-1:]
            ),
            rank_in_world=rank,
        )
        self.monitor.add(self.pool.handles[rank], answer)

    def run(self, seconds, *, is_stopped=False):
        """Let so many seconds pass. If the program is stopped meanwhile, the timers come late."""
        end = self.now + seconds
        if is_stopped:
            self.now = end
        while self.actions and min(at for at, _ in self.actions) <= end:
            at, action = min(self.actions, key=lambda item: item[0])
            self.actions.remove((at, action))
            self.now = max(self.now, at)
            action()
            for rank in [] if self.is_mute else WORLD:
                self.answer(rank)
        self.now = end


class SimpleNamespaceHandle(SimpleNamespace):
    """A handle that can be in a set."""

    __hash__ = object.__hash__


def test_one_warning_when_ranks_have_waited_for_stall_after():
    ranks = Ranks()
    ranks.wait_in(2, 0, 1)
    ranks.run(59.0)
    assert ranks.warnings == []
    ranks.run(7.0)
    (text,) = ranks.warnings
    assert text.startswith("ranks have waited for 6")
    assert "rank 2 has not joined barrier #2" in text
    ranks.run(600.0)
    assert len(ranks.warnings) == 1


def test_ranks_that_come_one_after_the_other_are_one_finding():
    ranks = Ranks()
    ranks.wait_in(2, 0)
    ranks.run(70.0)
    ranks.wait_in(2, 1)
    ranks.run(70.0)
    assert len(ranks.warnings) == 1


def finish(ranks, rank):
    """Let a rank return from its function."""
    ranks.pool.handles[rank].observations.answer = SimpleNamespace(kind=MessageKind.RETURNED)


@pytest.mark.parametrize(("may_call_again", "place", "ends"), [(False, "", 1), (True, "", 0), (True, "a.py:1 in f", 1)])
def test_a_rank_that_has_returned_ends_the_call_unless_it_may_join_in_a_later_call(may_call_again, place, ends):
    ranks = Ranks(may_call_again=may_call_again)
    ranks.place = place
    ranks.wait_in(2, 0, 1)
    finish(ranks, 2)
    ranks.run(62.0)
    assert (len(ranks.ends), len(ranks.warnings)) == (ends, 1 - ends)


def test_the_time_in_which_the_program_is_stopped_does_not_count():
    ranks = Ranks()
    ranks.wait_in(2, 0, 1)
    ranks.run(20.0)
    ranks.run(3600.0, is_stopped=True)
    ranks.run(20.0)
    assert ranks.warnings == []
    ranks.run(20.0)
    assert len(ranks.warnings) == 1


def test_a_mismatch_ends_the_call_when_it_is_found_twice():
    ranks = Ranks()
    ranks.wait_in(2, 0, 1)
    ranks.wait_in(2, 2, name="all_reduce")
    ranks.run(5.0)
    assert ranks.ends == []
    ranks.run(1.0)
    assert len(ranks.ends) == 1
    assert ranks.monitor.final_verdict.blamed == (2,)


def test_a_new_attempt_forgets_the_answers_of_the_last_one():
    ranks = Ranks()
    ranks.wait_in(2, 0)
    ranks.run(70.0)
    ranks.warnings.clear()
    ranks.is_mute = True
    ranks.run(5.0)
    ranks.calls = [[] for _ in WORLD]
    ranks.start()
    ranks.run(1.0)
    assert ranks.warnings == []


@pytest.mark.parametrize(("stall_after", "period"), [(1e-9, MIN_CHECK_SECONDS), (2.0, 0.5), (60.0, 5.0)])
def test_the_time_between_two_checks(stall_after, period):
    ranks = Ranks(stall_after)
    assert ranks.actions[0][0] == ranks.now + period


def test_a_node_reports_no_wait_before_it_is_long():
    ranks = Ranks(is_multi_node=True)
    ranks.wait_in(1, 0)
    ranks.run(50.0)
    assert ranks.stalls == []
    ranks.run(20.0)
    answers, returned = ranks.stalls[-1]
    assert answers[0].collectives[-1].seconds >= 60.0
    assert returned == []
    assert ranks.warnings == []
    count = len(ranks.stalls)
    ranks.run(300.0)
    assert len(ranks.stalls) == count


def test_a_node_reports_when_a_further_rank_has_waited_long_and_when_all_go_on():
    ranks = Ranks(is_multi_node=True)
    ranks.wait_in(1, 0)
    ranks.run(30.0)
    ranks.wait_in(1, 1, 2)
    ranks.run(35.0)
    before = len(ranks.stalls)
    ranks.run(30.0)
    assert len(ranks.stalls) == before + 1
    ranks.wait_in(2, 0, 1, 2)
    ranks.run(10.0)
    assert ranks.stalls[-1] == ({}, [])
