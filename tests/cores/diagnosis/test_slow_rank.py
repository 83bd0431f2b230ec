"""Which rank is named as the slow one, in simulated trainings."""

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from cores.diagnosis.evidence import answer, call, waiting
from mpwatch.watcher.diagnosis.slow_rank import SlowRankFinder

STEP, SLOW = 0.03, 0.006  # seconds
PERIOD = 1.3  # between two checks
COMMUNICATION = 0.0005
PLACE = "data.py:41 in load"
STACK = '  File "data.py", line 41 in load'


@dataclass(frozen=True)
class Operation:
    """A collective, of all ranks by default. With a root, as in a broadcast, they wait for the root only."""

    name: str = "all_reduce"
    group: str = "default"
    ranks: tuple = ()
    root: int | None = None


class Training:
    """Before each operation of a step, a rank works `work(rng, rank, step, number of the operation)` seconds.

    Then it waits for the others, or if the operations are asynchronous, at the end of the step.
    """

    def __init__(self, work, operations=(Operation(),), nprocs=4, *, is_async=False):
        self._work, self._operations, self._is_async = work, operations, is_async
        self._rng, self._steps, self._sequences = random.Random(nprocs), 0, Counter()
        self._calls = []  # the operation, its sequence number, when each rank has entered it, when it has ended
        self._free_at = dict.fromkeys(range(nprocs), 1000.0)

    def _do_step(self):
        for number, operation in enumerate(self._operations):
            self._sequences[operation.group] += 1
            ranks = operation.ranks or self._free_at
            entered = {rank: self._free_at[rank] + self._work(self._rng, rank, self._steps, number) for rank in ranks}
            ended_at = max(entered.values()) + COMMUNICATION
            self._calls.append((operation, self._sequences[operation.group], entered, ended_at))
            for rank, at in entered.items():
                awaited = ended_at if operation.root is None else entered[operation.root]
                self._free_at[rank] = at if self._is_async else max(at, awaited)
        if self._is_async:
            self._free_at = dict.fromkeys(self._free_at, max(self._free_at.values()))
        self._steps += 1

    def _answer(self, rank, now):
        found = []
        for operation, sequence, entered, ended_at in self._calls[-400:]:
            if entered.get(rank, math.inf) <= now:
                make = waiting if now < ended_at else call
                more = {"ranks": tuple(entered), "group": operation.group, "seconds": now - entered[rank]}
                found.append(make(operation.name, sequence, 8, **more))
        return answer(rank, *found[-64:], answered_at=now, place=PLACE, stack=STACK, has_all=len(found) <= 64)

    def watch(self, finder, seconds, *, silent=None):
        """Return what each check has found. One rank may be silent."""
        found, check_at = [], min(self._free_at.values()) + PERIOD
        end = check_at + seconds
        while check_at < end:
            while min(self._free_at.values()) < check_at + 0.1:
                self._do_step()
            finder.add({rank: self._answer(rank, check_at + rank * 0.002) for rank in self._free_at if rank != silent})
            found.append(finder.find())
            check_at += PERIOD
        return found


def uniform(rng):
    return STEP + rng.uniform(-STEP, STEP) / 4


def heavy_tailed(rng):
    return STEP / 2 + min(rng.paretovariate(1.5) * STEP / 6, 1.0)


def slow(seconds, slow_rank=1, until=math.inf, jitter=uniform):
    return lambda rng, rank, step, _: jitter(rng) + (seconds if rank == slow_rank and step < until else 0.0)


def load(seconds):
    """Rank 3 is slow before the first operation of a step."""
    return lambda rng, rank, _, number: 0.0005 if number else uniform(rng) + (seconds if rank == 3 else 0.0)


def load_and_work(slow_rank):
    return lambda rng, rank, _, number: STEP / 2 if number else uniform(rng) + (STEP if rank == slow_rank else 0.0)


def run_ahead(_, rank, *__):
    return STEP * (1 + rank)


def work_first(_, rank, __, number):
    """Rank 1 works before the first of twenty operations, and the others before each. So all call the last one together."""
    return (0.0585 if number == 0 else 0.0) if rank == 1 else 0.003


def work_in_second_group(rng, rank, _, number):
    """Rank 2 waits for rank 3 in their own group, so it is last in its group with rank 0."""
    return uniform(rng) / 2 + (2 * STEP if (rank, number) == (3, 1) else 0.0)


MANY = [Operation()] * 10
BUFFERS_FIRST = [Operation("broadcast", root=0), Operation()]
TENSOR_PARALLEL = [Operation(group="tp 0", ranks=(0, 1)), Operation(group="tp 1", ranks=(2, 3))]
DATA_PARALLEL = [Operation(group="dp 0", ranks=(0, 2)), Operation(group="dp 1", ranks=(1, 3))]
CASES = {
    # the ranks that are named at any check, the rank that is named at the last one, the training
    "nobody": (set(), None, slow(0.0), {}),
    "nobody of two": (set(), None, slow(0.0), {"nprocs": 2}),
    "nobody, but any step may be long": (set(), None, slow(0.0, jitter=heavy_tailed), {}),
    "nobody of two, but any step may be long": (set(), None, slow(0.0, jitter=heavy_tailed), {"nprocs": 2}),
    "slow only at the beginning": (set(), None, slow(STEP, until=100), {}),
    "slow for a while": ({1}, None, slow(STEP, until=400), {}),
    "a small delay": (set(), None, lambda _, rank, *__: STEP + (0.001 if rank == 1 else 0.0), {}),
    "a small delay in long steps": (set(), None, lambda _, rank, *__: 10 * STEP + (SLOW if rank == 1 else 0.0), {}),
    "each rank in turn": (set(), None, lambda _, rank, step, __: STEP + (SLOW if rank == step % 4 else 0.0), {}),
    "the buckets of DistributedDataParallel": (set(), None, load(0.0), {"operations": MANY, "is_async": True}),
    "the same with a slow loader": ({3}, 3, load(2 * SLOW), {"operations": MANY, "is_async": True}),
    "asynchronous calls without a wait": (set(), None, work_first, {"operations": MANY * 2, "is_async": True}),
    "the layers of FullyShardedDataParallel": (set(), None, load(0.0), {"operations": MANY}),
    "the same with one slow loader": ({3}, 3, load(2 * SLOW), {"operations": MANY}),
    "the root of a broadcast": ({0}, 0, load_and_work(0), {"operations": BUFFERS_FIRST}),
    "not the root of a broadcast": ({1}, 1, load_and_work(1), {"operations": BUFFERS_FIRST}),
    "the root of broadcasts runs ahead": (set(), None, run_ahead, {"operations": BUFFERS_FIRST[:1], "nprocs": 2}),
    "send is not judged": (set(), None, slow(STEP), {"operations": [Operation("send")]}),
    "in another group": ({3}, 3, work_in_second_group, {"operations": [*TENSOR_PARALLEL, *DATA_PARALLEL]}),
    "in another group, with layers": (
        *({3}, 3, work_in_second_group),
        {"operations": [*TENSOR_PARALLEL * 4, *DATA_PARALLEL]},
    ),
}


@pytest.mark.parametrize(("named", "last", "work", "options"), CASES.values(), ids=CASES)
def test_which_rank_is_named(named, last, work, options):
    found = [late and late.rank for late in Training(work, **options).watch(SlowRankFinder(), 60.0)]
    assert (set(found) - {None}, found[-1]) == (named, last)


@pytest.mark.parametrize("nprocs", [2, 4, 8])
def test_a_slow_rank_is_named_after_a_while_and_with_its_place(nprocs):
    first, *_, last = Training(slow(STEP), nprocs=nprocs).watch(SlowRankFinder(), 30.0)
    assert first is None
    assert (last.rank, last.place, last.stack) == (1, PLACE, STACK)
    assert 0.3 < last.share < 0.55


def test_a_rank_that_does_not_answer_once_is_not_missed():
    training, finder = Training(slow(STEP)), SlowRankFinder()
    training.watch(finder, 10.0)
    training.watch(finder, PERIOD, silent=0)
    assert training.watch(finder, 20.0)[-1].rank == 1


def test_calls_of_a_group_whose_ranks_are_not_known_are_not_judged():
    finder = SlowRankFinder()
    finder.add({0: answer(0, waiting("all_reduce", 1, 8, ranks=(0, 1))), 1: answer(1, call("all_reduce", 1, 8, ranks=()))})
    assert finder.find() is None
