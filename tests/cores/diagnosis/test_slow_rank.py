"""Which rank is named as the slow one, in simulated trainings."""

import random
from dataclasses import dataclass, field

import pytest

from cores.diagnosis.evidence import answer, call, waiting
from mpwatch.watcher.diagnosis.slow_rank import SlowRankFinder

STEP, SLOW = 0.03, 0.006  # seconds
PERIOD = 1.3  # between two checks
COMMUNICATION = 0.0005
PLACE = "data.py:41 in load"
STACK = '  File "data.py", line 41 in load'


@dataclass
class Training:
    """Ranks that work, and then call collectives in which they wait for one another."""

    nprocs: int
    work: object  # seconds that a rank works in a step
    names: tuple = ("all_reduce",)  # in each step
    is_async: bool = False  # then a step waits for all of its collectives at the end
    now: float = 1000.0
    calls: list = field(default_factory=list)  # name, group, sequence, entries by rank, when all have them
    sequences: dict = field(default_factory=dict)

    def __post_init__(self):
        self.free_at = [self.now] * self.nprocs

    def step(self, groups=None):
        for group in groups or [("default", tuple(range(self.nprocs)))]:
            name, ranks = group
            for operation in self.names:
                number = self.sequences[group] = self.sequences.get(group, 0) + 1
                entries = {rank: self.free_at[rank] + self.work(rank, len(self.calls)) for rank in ranks}
                released_at = max(entries.values()) + COMMUNICATION
                self.calls.append((operation, name, number, ranks, entries, released_at))
                for rank in ranks:
                    self.free_at[rank] = entries[rank] if self.is_async else released_at
        if self.is_async:
            self.free_at = [max(self.free_at)] * self.nprocs

    def answers(self, now):
        return {rank: self._answer(rank, now + rank * 0.002) for rank in range(self.nprocs)}

    def _answer(self, rank, now):
        found = []
        for operation, name, number, ranks, entries, released_at in self.calls[-400:]:
            if rank in ranks and entries[rank] <= now:
                make = waiting if now < released_at else call
                found.append(make(operation, number, 8, ranks=ranks, group=name, seconds=now - entries[rank]))
        return answer(rank, *found[-64:], answered_at=now, place=PLACE, stack=STACK, has_all=len(found) <= 64)

    def watch(self, seconds, finder, groups=None):
        """Return what each check has found."""
        found, check_at = [], min(self.free_at) + PERIOD
        end = check_at + seconds
        while check_at < end:
            while min(self.free_at) < check_at + 0.1:
                self.step(groups)
            finder.add(self.answers(check_at))
            found.append(finder.find())
            check_at += PERIOD
        return found


def uniform(rng):
    return STEP + rng.uniform(-STEP, STEP) / 4


def heavy_tailed(rng):
    return STEP / 2 + min(rng.paretovariate(1.5) * STEP / 6, 1.0)


def make_work(jitter, seed, slow_rank=None, slow=SLOW):
    rng = random.Random(seed)
    return lambda rank, _: jitter(rng) + (slow if rank == slow_rank else 0.0)


@pytest.mark.parametrize("nprocs", [2, 4, 8])
def test_a_slow_rank_is_named_with_its_place(nprocs):
    training = Training(nprocs, make_work(uniform, 1, slow_rank=1, slow=STEP))
    first, *_, last = training.watch(30.0, SlowRankFinder())
    assert first is None
    assert (last.rank, last.place, last.stack, last.name, last.group) == (1, PLACE, STACK, "all_reduce", "default")
    assert last.times_last > 0.9 * last.collectives
    assert last.collectives <= 1000
    assert STEP / 2 < last.seconds < STEP * 1.2


@pytest.mark.parametrize("jitter", [uniform, heavy_tailed])
@pytest.mark.parametrize("nprocs", [2, 4])
def test_nobody_is_named_in_a_sound_run(nprocs, jitter):
    assert set(Training(nprocs, make_work(jitter, 2)).watch(40.0, SlowRankFinder())) == {None}


def test_a_rank_that_is_slow_only_at_the_beginning_is_not_named():
    rng = random.Random(3)
    training = Training(4, lambda rank, number: uniform(rng) + (STEP if rank == 2 and number < 100 else 0.0))
    assert set(training.watch(30.0, SlowRankFinder())) == {None}


def test_a_rank_that_was_slow_is_forgotten():
    rng, slow_until = random.Random(4), 600
    training = Training(4, lambda rank, number: uniform(rng) + (STEP if rank == 2 and number < slow_until else 0.0))
    found = training.watch(80.0, SlowRankFinder())
    assert {late.rank for late in found if late is not None} == {2}
    assert found[-1] is None


def test_a_small_or_rare_delay_names_nobody():
    small = Training(4, lambda rank, _: STEP + (0.001 if rank == 1 else 0.0))
    of_long_steps = Training(4, lambda rank, _: 10 * STEP + (SLOW if rank == 1 else 0.0))
    rare = Training(4, lambda rank, number: STEP + (SLOW if rank == number % 4 else 0.0))
    assert {late for training in (small, of_long_steps, rare) for late in training.watch(30.0, SlowRankFinder())} == {None}


def test_buckets_of_one_step_count_once():
    """Without its first bucket, a step has no lateness of its own, however many buckets follow."""
    rng, finder = random.Random(5), SlowRankFinder()

    def work(rank, number):
        is_first = number % 10 == 0
        return (uniform(rng) + (SLOW * 2 if rank == 3 else 0.0)) if is_first else 0.0005

    last = Training(4, work, names=("all_reduce",) * 10, is_async=True).watch(60.0, finder)[-1]
    assert last.rank == 3
    assert last.collectives < 1.1 * 60 / STEP


def test_collectives_right_after_one_another_do_not_hide_the_slow_rank():
    rng = random.Random(10)
    work = make_work(uniform, 11, slow_rank=2, slow=STEP)
    training = Training(4, lambda *at: rng.uniform(0, 0.001) if at[1] % 3 else work(*at), names=("all_reduce",) * 3)
    assert training.watch(60.0, SlowRankFinder())[-1].rank == 2


@pytest.mark.parametrize("name", ["broadcast", "gather", "barrier", "send"])
def test_calls_in_which_not_all_wait_do_not_count(name):
    training = Training(4, make_work(uniform, 6, slow_rank=1, slow=STEP), names=(name,))
    assert set(training.watch(30.0, SlowRankFinder())) == {None}


def test_the_victim_of_a_slow_rank_in_another_group_is_not_named():
    """Rank 2 waits for rank 3 in their own group, so it is last in its group with rank 0."""
    rng = random.Random(7)
    groups = [("tp 0", (0, 1)), ("tp 1", (2, 3)), ("dp 0", (0, 2)), ("dp 1", (1, 3))]
    training = Training(4, lambda rank, _: uniform(rng) / 2 + (STEP if rank == 3 else 0.0))
    last = training.watch(60.0, SlowRankFinder(), groups)[-1]
    assert (last.rank, "of group" in str(last)) == (3, True)


def test_numbers_that_begin_anew_are_of_another_group():
    finder = SlowRankFinder()
    assert Training(2, make_work(uniform, 8, slow_rank=1, slow=STEP)).watch(30.0, finder)[-1].rank == 1
    assert Training(2, make_work(uniform, 9)).watch(30.0, finder)[-1] is None
