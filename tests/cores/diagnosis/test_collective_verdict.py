"""Which rank does not fit, from the collectives that the ranks have called."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cores.diagnosis.evidence import answer, call, waiting
from mpwatch import CollectiveState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.collective_verdict import VerdictKind, find_verdict

MISMATCH, ABSENT, CROSSED = VerdictKind
FIRST = call("all_reduce", 1, 16)
USUAL = waiting("all_reduce", 2, 16, place="a.py:1 in f")
ONE = waiting("all_reduce", 1, 4)


def verdict_of(*calls_of_ranks, returned=()):
    return find_verdict({rank: answer(rank, *calls) for rank, calls in enumerate(calls_of_ranks)}, returned)


def between(*odd):
    """The calls of three ranks, of which rank 1 has made others after the first one."""
    return [(FIRST, USUAL), (FIRST, *odd), (FIRST, USUAL)]


def with_field(name, field, *values):
    """The calls of ranks that wait in the same collective, but for the value of one field."""
    return [(waiting(name, 1, 4, **{field: value}),) for value in values]


def in_shapes(*shapes, nprocs=7):
    return [(waiting("all_reduce", 1, shape, ranks=tuple(range(nprocs))),) for shape in shapes]


TABLE = {
    # the sentence: the kind of the verdict and the ranks that are blamed, the calls of each rank
    "rank 1 called all_reduce #2 with float32[17] (a.py:2 in f), ranks 0, 2 with float32[16] (a.py:1 in f)": (
        (MISMATCH, 1),
        between(waiting("all_reduce", 2, 17, place="a.py:2 in f")),
    ),
    "rank 1 called barrier #2 with no tensor, ranks 0, 2 all_reduce #2 with float32[16] (a.py:1 in f)": (
        (MISMATCH, 1),
        between(waiting("barrier", 2)),
    ),
    "rank 1 called broadcast #1 with root 2, ranks 0, 2 with root 0": (
        (MISMATCH, 1),
        with_field("broadcast", "root", 0, 2, 0),
    ),
    "rank 2 called all_reduce #1 with op MAX, ranks 0-1 with op SUM": (
        (MISMATCH, 2),
        with_field("all_reduce", "reduce_op", "SUM", "SUM", "MAX"),
    ),
    "rank 0 called all_reduce #1 with float32[16], rank 1 with float32[17]": ((MISMATCH,), in_shapes(16, 17, nprocs=2)),
    # rank 2 has not joined
    "rank 0 called all_reduce #2 with float32[16] (a.py:1 in f), rank 1 barrier #2 with no tensor": (
        (MISMATCH,),
        [(FIRST, USUAL), (FIRST, waiting("barrier", 2)), (FIRST,)],
    ),
    # the majority may change: two ranks of seven are on another node
    "ranks 2-4 called all_reduce #1 with float32[16], ranks 0-1 with float32[17]": (
        (MISMATCH,),
        in_shapes(17, 17, 16, 16, 16),
    ),
    "rank 3 called all_reduce #1 with float32[17], ranks 0-2 with float32[16], rank 4 with float32[18]; "
    "rank 4 called all_reduce #1 with float32[18], ranks 0-2 with float32[16], rank 3 with float32[17]": (
        (MISMATCH, 3, 4),
        in_shapes(16, 16, 16, 17, 18, nprocs=5),
    ),
    "rank 1 has not joined all_reduce #2 (float32[16], default group), in which ranks 0, 2 wait (a.py:1 in f); "
    "its last collective was all_reduce #1": ((ABSENT, 1), between()),
    # rank 0 waits for rank 1, which waits for rank 2
    "rank 2 has not joined all_reduce #1 (float32[4], group 1), in which rank 1 waits; it has called no collective": (
        (ABSENT, 2),
        [(ONE,), (replace(ONE, group="1", ranks=(1, 2)),), ()],
    ),
    "rank 1 waits in all_reduce #1 (float32[4], group 1) at a.py:2 in f, but ranks 0, 2 wait for it in all_reduce #2 "
    "(float32[16], default group) at a.py:1 in f": (
        (CROSSED, 1),
        between(replace(ONE, place="a.py:2 in f", group="1", ranks=(0, 1))),
    ),
    "rank 0 has not completed recv #1 (float32[4], default group), but ranks 1-2 wait for it in all_reduce #1 "
    "(float32[4], default group)": ((CROSSED,), [(waiting("recv", 1, 4),), (ONE,), (ONE,)]),
}


@pytest.mark.parametrize("sentence", TABLE)
def test_a_verdict(sentence):
    (kind, *blamed), calls = TABLE[sentence]
    verdict = verdict_of(*calls)
    assert (verdict.sentence, verdict.kind, [*verdict.blamed], [*verdict.evidence]) == (sentence, kind, blamed, blamed)


def test_a_rank_that_has_returned_is_blamed_before_one_that_is_late():
    verdict = verdict_of((FIRST, USUAL), (FIRST,), (), returned=[2])
    assert (verdict.blamed, verdict.have_returned, verdict.cannot_end_well) == ((2,), True, True)
    assert verdict.sentence == (
        "rank 2 has returned, but rank 0 waits for it in all_reduce #2 (float32[16], default group) (a.py:1 in f); "
        "it has called no collective"
    )


GATHERS = waiting("gather", 1, 4, output_shapes=(), output_dtypes=())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (waiting("all_reduce", 1, 2, 2), ONE),  # the same elements in another shape
        (waiting("send", 1, 4), waiting("recv", 1, 4)),
        (call("all_reduce", 1, 4), call("all_reduce", 1, 5)),  # nobody waits
        (replace(ONE, group="1", ranks=(0,)), waiting("all_reduce", 1, 5, group="1", ranks=(1,))),
        (replace(GATHERS, output_shapes=((2, 4),)), GATHERS),  # only its root has outputs
    ],
)
def test_what_may_differ_is_no_mismatch(one, other):
    assert verdict_of((one,), (other,)) is None


# --- ranks of which too little is known


def test_a_rank_that_has_not_answered_or_whose_cause_has_not_is_not_blamed():
    assert find_verdict({rank: answer(rank, waiting("barrier", 1)) for rank in (0, 2)}) is None
    # rank 2 holds the GIL: rank 1 waits for it in a subgroup, and rank 0 waits for rank 1
    verdict = verdict_of((FIRST, USUAL), (FIRST, waiting("barrier", 1, group="1", ranks=(1, 2), place="a.py:2 in f")))
    assert (verdict.blamed, verdict.is_complete) == ((), False)


def test_a_rank_whose_old_collectives_are_forgotten_may_have_joined():
    late = answer(1, call("barrier", 900, group="1", ranks=(1,)), has_all=False)
    answers = {0: answer(0, waiting("barrier", 1)), 1: late}
    assert find_verdict(answers) is None
    assert find_verdict({**answers, 1: replace(late, has_all=True)}).blamed == (1,)


def test_many_ranks_are_compared_in_a_moment():
    """The time grows with the number of ranks, not with its square: 1,024 ranks take half a second."""
    world, before = tuple(range(1024)), time.process_time()
    calls = tuple(call("all_reduce", number, 16, ranks=world) for number in range(1, 9))
    verdict = verdict_of(*[(*calls, waiting("all_reduce", 9, 16, ranks=world))] * 1023, calls)
    assert (verdict.blamed, time.process_time() - before < 10) == ((1023,), True)


def test_answers_survive_json():
    odd = waiting("all_reduce", 2, 4, 4, root=1, reduce_op="SUM", place="é.py:2 in f", seconds=0.5)
    for sent in (answer(1, FIRST, odd, place="a.py:1 in f", has_all=False), RankCollectives()):
        assert RankCollectives.from_json(sent.to_json()) == sent


# --- histories: ranks that run the same program, one of which deviates

CALLS = st.tuples(st.sampled_from(["all_reduce", "broadcast", "reduce"]), st.integers(1, 4))
PROGRAM, NPROCS = st.lists(CALLS, min_size=1, max_size=6), st.integers(3, 6)


def play(programs):
    """Return the calls of each rank when no collective can end any more: one ends when all ranks have called it alike."""
    done = 0
    while all(len(program) > done for program in programs) and len({program[done] for program in programs}) == 1:
        done += 1
    ranks = tuple(range(len(programs)))
    played = []
    for program in programs:
        calls = [call(name, n, size, ranks=ranks) for n, (name, size) in enumerate(program[: done + 1], 1)]
        played.append((*calls[:done], *(replace(last, state=CollectiveState.WAITING) for last in calls[done:])))
    return played


@given(PROGRAM, NPROCS, st.data())
def test_ranks_that_agree_are_never_a_mismatch(program, nprocs, data):
    """They are asked at different moments, so they have got to different places."""
    cut = [calls[: data.draw(st.integers(0, len(calls)))] for calls in play([program] * nprocs)]
    first, last = min(map(len, cut)), max(map(len, cut))
    cut = [tuple(replace(c, state=CollectiveState.WAITING) if c.sequence > first else c for c in calls) for calls in cut]
    verdict = verdict_of(*cut)
    assert verdict is None or (verdict.kind is ABSENT and all(len(cut[rank]) < last for rank in verdict.blamed))


@given(PROGRAM, NPROCS, st.data())
def test_a_rank_that_deviates_is_blamed(program, nprocs, data):
    odd_rank, place = data.draw(st.integers(0, nprocs - 1)), data.draw(st.integers(0, len(program) - 1))
    name, size = program[place]
    change = data.draw(st.sampled_from([[(name, size + 10)], [], [("all_gather", 3), (name, size)]]))
    odd = [*program[:place], *change, *program[place + 1 :]]
    played = play([odd if rank == odd_rank else program for rank in range(nprocs)])
    has_called_too_few = odd == program[: len(odd)]
    verdict = verdict_of(*played, returned=[odd_rank] if has_called_too_few else [])
    assert (verdict.kind, verdict.blamed) == (ABSENT if has_called_too_few else MISMATCH, (odd_rank,))
