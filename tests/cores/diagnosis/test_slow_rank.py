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
                entries = {rank: self.free_at[rank] + self.work(rank, len(self.calls)) for rank in ranks}
                self.call(operation, name, ranks, entries, is_async=self.is_async)
        if self.is_async:
            self.free_at = [max(self.free_at)] * self.nprocs

    def call(self, operation, name, ranks, entries, *, is_async=False, root=None):
        number = self.sequences[name, ranks] = self.sequences.get((name, ranks), 0) + 1
        released_at = max(entries.values()) + COMMUNICATION
        self.calls.append((operation, name, number, ranks, entries, released_at))
        for rank in ranks:
            awaited = entries[rank] if is_async else released_at if root is None else max(entries[rank], entries[root])
            self.free_at[rank] = awaited

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
    assert (last.rank, last.place, last.stack) == (1, PLACE, STACK)
    assert 0.3 < last.share < 0.55


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


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("slow", [0.0, SLOW * 2])
def test_a_step_with_many_collectives(is_async, slow):
    """As the buckets of DistributedDataParallel, and the layers of FullyShardedDataParallel. The loader is slow."""
    rng, number_of_calls = random.Random(5), 10

    def work(rank, number):
        is_first = number % number_of_calls == 0
        return (uniform(rng) + (slow if rank == 3 else 0.0)) if is_first else 0.0005

    last = Training(4, work, names=("all_reduce",) * number_of_calls, is_async=is_async).watch(60.0, SlowRankFinder())[-1]
    assert last.rank == 3 if slow else last is None


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_broadcast_before_the_collectives_of_a_step(slow_rank):
    """As the buffers of a model. Its root waits for nobody, and the others only for the root."""
    rng, finder = random.Random(6), SlowRankFinder()
    training, ranks = Training(4, None), tuple(range(4))

    def step(_groups):
        loaded = {rank: training.free_at[rank] + uniform(rng) + (STEP if rank == slow_rank else 0.0) for rank in ranks}
        training.call("broadcast", "default", ranks, loaded, root=0)
        worked = {rank: training.free_at[rank] + STEP / 2 for rank in ranks}
        training.call("all_reduce", "default", ranks, worked)

    training.step = step
    assert training.watch(40.0, finder)[-1].rank == slow_rank


def test_ranks_that_run_ahead_do_not_wait():
    """The root of a broadcast comes to the next ones long before the others."""
    training, ranks = Training(2, None), (0, 1)

    def step(_groups):
        entries = {rank: training.free_at[rank] + STEP * (1 + rank) for rank in ranks}
        training.call("broadcast", "default", ranks, entries, root=0)

    training.step = step
    assert set(training.watch(20.0, SlowRankFinder())) == {None}


def test_send_and_recv_are_not_judged():
    training = Training(4, make_work(uniform, 6, slow_rank=1, slow=STEP), names=("send",))
    assert set(training.watch(30.0, SlowRankFinder())) == {None}


@pytest.mark.parametrize("layers", [1, 4])
def test_the_victim_of_a_slow_rank_in_another_group_is_not_named(layers):
    """Rank 2 waits for rank 3 in their own group, so it is last in its group with rank 0."""
    rng = random.Random(7)
    groups = [*[("tp 0", (0, 1)), ("tp 1", (2, 3))] * layers, ("dp 0", (0, 2)), ("dp 1", (1, 3))]
    training = Training(
        4, lambda rank, number: uniform(rng) / 2 + (STEP * 2 if (rank, number % len(groups)) == (3, 1) else 0.0)
    )
    found = {late.rank for late in training.watch(60.0, SlowRankFinder(), groups) if late is not None}
    assert found == {3}


def test_a_rank_that_does_not_answer_once_is_not_missed():
    training, finder = Training(4, make_work(uniform, 8, slow_rank=1, slow=STEP)), SlowRankFinder()
    training.watch(10.0, finder)
    finder.add({rank: answer for rank, answer in training.answers(training.now + 12.0).items() if rank})
    assert training.watch(20.0, finder)[-1].rank == 1
