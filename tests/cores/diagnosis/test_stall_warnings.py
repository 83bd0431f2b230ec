"""When the watcher warns of ranks that wait in a collective, or names a slow one, in virtual time."""

import heapq
import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cores.diagnosis.evidence import answer, call, waiting
from mpwatch.watcher.observers.collective_monitor import CollectiveMonitor

SLOWEST_ANSWER = 0.9
STALL_AFTER = st.sampled_from([0.5, 1.0, 2.0, 4.0, 20.0]) | st.floats(0.5, 120.0)
DELAYS = st.lists(st.floats(0.0, SLOWEST_ANSWER), min_size=1, max_size=9)


class Simulation:
    """A monitor and the ranks that it asks. Each rank answers after a delay."""

    def __init__(self, stall_after, answer_of, delays=(0.0,)):
        self.now, self._timers, self._order = 0.0, [], itertools.count()
        self._answer_of, self._delays = answer_of, itertools.cycle(delays)
        self.warned_at, self.ended_at, self.slow, self.is_checking = [], [], [], True
        ranks = [self._make_rank(number) for number in range(3)]
        self.monitor = CollectiveMonitor(
            lambda: ranks,
            stall_after,
            SimpleNamespace(warn=lambda *_: self.warned_at.append(self.now)),
            is_called=lambda _: True,
            is_checking=lambda: self.is_checking,
            call_at=self.call_at,
            end_call=lambda: self.ended_at.append(self.now),
            on_slow_rank=self.slow.append,
            on_stall=None,
            now=lambda: self.now,
        )
        self.monitor.start()

    def call_at(self, at, function):
        heapq.heappush(self._timers, (at, next(self._order), function))

    def run_until(self, end):
        while self._timers[0][0] <= end:
            self.now, _, function = heapq.heappop(self._timers)
            function()
        self.now = end

    def _make_rank(self, number):
        def ask(receive, rank):
            self.call_at(self.now + next(self._delays), lambda: receive(rank, self._answer_of(number, self.now)))
            return True

        return SimulatedRank(number, SimpleNamespace(is_open=True, ask=ask))


@dataclass(eq=False)
class SimulatedRank:
    number: int
    collective_socket: SimpleNamespace
    observations = SimpleNamespace(answer=None)


def is_late(begun_at):
    """From `begun_at` on, ranks 0 and 1 wait for rank 2."""

    def answer_of(number, now):
        first = call("all_reduce", 1, 16)
        waits = number < 2 and now >= begun_at
        return answer(number, first, *([waiting("all_reduce", 2, 16, seconds=now - begun_at)] if waits else []))

    return answer_of


@settings(max_examples=40)
@given(stall_after=STALL_AFTER, begun_at=st.floats(0.0, 20.0), delays=DELAYS)
def test_each_wait_is_told_once_and_within_one_period(stall_after, begun_at, delays):
    simulation = Simulation(stall_after, is_late(begun_at), delays=delays)
    simulation.run_until(begun_at + 3 * stall_after + 20.0)
    (warned_at,) = simulation.warned_at
    period = min(5.0, stall_after / 4)
    assert stall_after <= warned_at - begun_at <= stall_after + max(period, SLOWEST_ANSWER + period) + SLOWEST_ANSWER
    assert not simulation.ended_at


@settings(max_examples=40)
@given(stall_after=STALL_AFTER, delays=DELAYS)
def test_ranks_that_never_match_end_the_call_soon(stall_after, delays):
    calls = {0: waiting("all_reduce", 1, 16), 1: waiting("barrier", 1), 2: waiting("all_reduce", 1, 16)}
    simulation = Simulation(stall_after, lambda rank, _: answer(rank, calls[rank]), delays=delays)
    simulation.run_until(60.0)
    assert simulation.ended_at[0] <= 2 * min(5.0, stall_after / 4) + 2 * SLOWEST_ANSWER + 1.0


def test_a_suspended_limit_does_not_count():
    simulation = Simulation(2.0, is_late(0.0))
    simulation.run_until(1.0)
    simulation.is_checking = False
    simulation.run_until(60.0)
    simulation.is_checking = True
    simulation.run_until(61.5)
    assert not simulation.warned_at
    simulation.run_until(63.0)
    assert len(simulation.warned_at) == 1


def comes_last(known_at):
    """In each second, rank 2 comes to a collective 0.6 s after the others. Its place is known from `known_at` on."""

    def answer_of(number, now):
        calls = []
        for step in range(int(now) + 1):
            at, ends_at = step + (1.3 if number == 2 else 0.7), step + 1.3
            if at <= now:
                calls.append((waiting if now < ends_at else call)("all_reduce", step + 1, 16, seconds=now - at))
        return answer(number, *calls, answered_at=now, place="data.py:41 in load" if now >= known_at else "")

    return answer_of


@pytest.mark.parametrize(
    ("known_at", "named_at", "place"),
    [(0.0, 13, "data.py:41 in load"), (20.0, 20, "data.py:41 in load"), (math.inf, 42, "")],
)
def test_a_slow_rank_is_named_when_its_place_is_known_or_after_forty_checks(known_at, named_at, place):
    simulation = Simulation(4.0, comes_last(known_at))  # a check in each second
    simulation.run_until(named_at - 0.5)
    assert not simulation.slow
    simulation.run_until(named_at + 0.5)
    assert [(late.rank, late.place) for late in simulation.slow] == [(2, place)]
