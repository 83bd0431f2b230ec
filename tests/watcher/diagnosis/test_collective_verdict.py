"""Which rank does not fit, from the collectives that the ranks have called. Without processes."""

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch.results.collective import Collective, CollectiveState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.collective_verdict import (
    VerdictKind,
    find_verdict,
    find_verdicts,
    get_current_collective,
    select_new_stalls,
)

WORLD = (0, 1, 2)
DONE, WAITING = CollectiveState.COMPLETED, CollectiveState.WAITING


def call(name, sequence, *shape, state=DONE, dtype="float32", group="default", ranks=WORLD, **details):
    shapes = (shape,) if shape else ()
    dtypes = (dtype,) if shape else ()
    return Collective(
        name=name,
        sequence=sequence,
        group=group,
        ranks=ranks,
        state=state,
        input_shapes=shapes,
        output_shapes=shapes,
        input_dtypes=dtypes,
        output_dtypes=dtypes,
        **details,
    )


def waiting(name, sequence, *shape, **details):
    return call(name, sequence, *shape, state=WAITING, **details)


def answer(rank, *calls, **details):
    return RankCollectives(collectives=calls, **{"rank_in_world": rank, **details})


def answers_of(*calls_of_ranks):
    return {rank: answer(rank, *calls) for rank, calls in enumerate(calls_of_ranks)}


def verdict_of(*calls_of_ranks, returned=()):
    return find_verdict(answers_of(*calls_of_ranks), returned)


FIRST = call("all_reduce", 1, 16)


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (
            waiting("all_reduce", 2, 17, place="a.py:2 in f"),
            "rank 1 called all_reduce #2 with float32[17] (a.py:2 in f), ranks 0, 2 with float32[16] (a.py:1 in f)",
        ),
        (
            waiting("all_reduce", 2, 16, dtype="float64"),
            "rank 1 called all_reduce #2 with float64[16], ranks 0, 2 with float32[16] (a.py:1 in f)",
        ),
        (
            waiting("broadcast", 2, 8),
            "rank 1 called broadcast #2 with float32[8], ranks 0, 2 all_reduce #2 with float32[16] (a.py:1 in f)",
        ),
        (
            waiting("barrier", 2),
            "rank 1 called barrier #2 with no tensor, ranks 0, 2 all_reduce #2 with float32[16] (a.py:1 in f)",
        ),
    ],
)
def test_the_minority_is_blamed_for_a_mismatch(odd, text):
    usual = waiting("all_reduce", 2, 16, place="a.py:1 in f")
    verdict = verdict_of((FIRST, usual), (FIRST, odd), (FIRST, usual))
    assert (verdict.kind, verdict.blamed, verdict.sentence) == (VerdictKind.MISMATCH, (1,), text)
    assert verdict.evidence == {1: text.removeprefix("rank 1 ")}


@pytest.mark.parametrize(("name", "field"), [("reduce", "root"), ("broadcast", "root")])
def test_ranks_may_differ_in_the_root(name, field):
    verdict = verdict_of(*[(waiting(name, 1, 4, **{field: value}),) for value in (0, 2, 0)])
    assert verdict.sentence == f"rank 1 called {name} #1 with root 2, ranks 0, 2 with root 0"
    unknown = verdict_of((waiting(name, 1, 4, root=0),), (waiting(name, 1, 4),), (call(name, 1, 4),))
    assert unknown is None


def test_ranks_may_differ_in_the_reduction():
    verdict = verdict_of(*[(waiting("all_reduce", 1, 4, reduce_op=op),) for op in ("SUM", "SUM", "MAX")])
    assert verdict.sentence == "rank 2 called all_reduce #1 with op MAX, ranks 0-1 with op SUM"


def test_nobody_is_blamed_without_a_majority():
    verdict = verdict_of((waiting("all_reduce", 1, 16),), (waiting("all_reduce", 1, 17),))
    assert (verdict.blamed, verdict.evidence) == ((), {})
    assert verdict.sentence == "rank 0 called all_reduce #1 with float32[16], rank 1 with float32[17]"


def test_nobody_is_blamed_while_the_majority_may_change():
    """Four ranks have not called it yet, or are on another node."""
    ranks = tuple(range(7))
    calls = [(waiting("all_reduce", 1, shape, ranks=ranks),) for shape in (17, 17, 16)]
    verdict = verdict_of(*calls, (), ())
    assert (verdict.kind, verdict.blamed) == (VerdictKind.MISMATCH, ())
    assert verdict.sentence == "ranks 0-1 called all_reduce #1 with float32[17], rank 2 with float32[16]"
    verdict = verdict_of(*calls, *[(waiting("all_reduce", 1, 16, ranks=ranks),)] * 2)
    assert verdict.blamed == ()
    verdict = verdict_of(*calls, *[(waiting("all_reduce", 1, 16, ranks=ranks),)] * 4)
    assert verdict.blamed == (0, 1)


def test_several_ranks_that_differ_are_all_blamed():
    shapes = (16, 16, 16, 17, 18)
    verdict = verdict_of(*[(waiting("all_reduce", 1, shape, ranks=tuple(range(5))),) for shape in shapes])
    assert verdict.blamed == (3, 4)
    assert verdict.sentence == (
        "rank 3 called all_reduce #1 with float32[17], ranks 0-2 with float32[16], rank 4 with float32[18]; "
        "rank 4 called all_reduce #1 with float32[18], ranks 0-2 with float32[16], rank 3 with float32[17]"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (waiting("all_reduce", 1, 4, 4), waiting("all_reduce", 1, 16)),  # the same elements in another shape
        (waiting("all_to_all", 1, 4), waiting("all_to_all", 1, 8)),
        (waiting("barrier", 1), waiting("barrier", 1)),
        (waiting("send", 1, 4), waiting("recv", 1, 4)),
        (waiting("a_new_one", 1, 4), waiting("a_new_one", 1, 5)),
        (call("all_reduce", 1, 4), call("all_reduce", 1, 5)),  # nobody waits
        (waiting("all_reduce", 1, 4, group="1", ranks=(0,)), waiting("all_reduce", 1, 5, group="1", ranks=(1,))),
    ],
)
def test_what_may_differ_is_no_mismatch(one, other):
    assert verdict_of((one,), (other,)) is None


def test_only_the_root_of_a_gather_has_outputs():
    root = replace(waiting("gather", 1, 4), output_shapes=((2, 4),))
    other = replace(waiting("gather", 1, 4), output_shapes=(), output_dtypes=())
    assert verdict_of((root,), (other,)) is None
    source = replace(waiting("scatter", 1, 4), input_shapes=((2, 4),))
    target = replace(waiting("scatter", 1, 4), input_shapes=(), input_dtypes=())
    assert verdict_of((source,), (target,)) is None


def test_a_rank_that_has_not_joined():
    usual = waiting("all_reduce", 2, 1024, place="a.py:1 in f", seconds=61.0)
    verdict = verdict_of((FIRST, usual), (FIRST, usual), (replace(FIRST, place=""),))
    assert (verdict.kind, verdict.blamed, verdict.seconds) == (VerdictKind.ABSENT, (2,), 61.0)
    assert verdict.sentence == (
        "rank 2 has not joined all_reduce #2 (float32[1024], default group), in which ranks 0-1 wait (a.py:1 in f); "
        "its last collective was all_reduce #1"
    )


def test_a_rank_that_has_returned():
    verdict = verdict_of((waiting("barrier", 1),), (waiting("barrier", 1),), (), returned=[2])
    assert verdict.sentence == (
        "rank 2 has returned, but ranks 0-1 wait for it in barrier #1 (default group); it has called no collective"
    )


def test_a_rank_that_waits_elsewhere_is_not_blamed_if_another_one_is_free():
    """Rank 0 waits for rank 1, which waits for rank 2."""
    pair = (1, 2)
    verdict = verdict_of((waiting("all_reduce", 1, 4),), (waiting("all_reduce", 1, 4, group="1", ranks=pair),), ())
    assert verdict.blamed == (2,)
    assert "rank 2 has not joined all_reduce #1" in verdict.sentence


def test_ranks_that_wait_for_one_another():
    usual = waiting("all_reduce", 2, 16, place="a.py:1 in f")
    odd = waiting("all_reduce", 1, 16, group="1", ranks=(0, 1), place="a.py:2 in f")
    verdict = verdict_of((FIRST, usual), (FIRST, odd), (FIRST, usual))
    assert (verdict.kind, verdict.blamed) == (VerdictKind.CROSSED, (1,))
    assert verdict.sentence == (
        "rank 1 waits in all_reduce #1 (float32[16], group 1) at a.py:2 in f, but ranks 0, 2 wait for it in all_reduce #2 "
        "(float32[16], default group) at a.py:1 in f"
    )


def test_a_rank_that_waits_in_recv_is_not_free():
    usual = waiting("all_reduce", 1, 4)
    verdict = verdict_of((waiting("recv", 1, 4),), (usual,), (usual,))
    assert (verdict.kind, verdict.blamed, verdict.is_complete) == (VerdictKind.CROSSED, (), False)
    assert verdict.sentence.startswith(
        "rank 0 has not completed recv #1 (float32[4], default group), but ranks 1-2 wait for it in all_reduce"
    )


def test_two_ranks_that_wait_for_one_another():
    verdict = verdict_of((waiting("barrier", 1, ranks=(0, 1)),), (waiting("barrier", 1, group="1", ranks=(0, 1)),))
    assert verdict.blamed == ()
    assert verdict.sentence == (
        "rank 1 waits in barrier #1 (group 1), rank 0 waits in barrier #1 (default group): they wait for one another"
    )


def test_a_rank_that_has_not_answered_is_not_blamed():
    answers = {rank: answer(rank, waiting("barrier", 1)) for rank in (0, 2)}
    assert find_verdict(answers) is None


def test_a_rank_whose_old_collectives_are_forgotten_may_have_joined():
    answers = {
        0: answer(0, waiting("barrier", 1)),
        1: answer(1, call("barrier", 900, group="1", ranks=(1,)), has_all=False),
    }
    assert find_verdict(answers) is None
    answers[1] = replace(answers[1], has_all=True)
    assert find_verdict(answers).blamed == (1,)


def test_a_rank_that_has_not_returned_may_not_have_made_the_new_group_yet():
    """The new group has the name and the ranks of the one that was destroyed."""
    new = waiting("broadcast", 1, 8, group_number=2)
    verdict = verdict_of((new,), (new,), (call("all_reduce", 1, 16),))
    assert (verdict.kind, verdict.blamed) == (VerdictKind.ABSENT, (2,))


def test_a_rank_that_has_returned_is_blamed_before_one_that_is_late():
    verdict = verdict_of((FIRST, waiting("all_reduce", 2, 16)), (FIRST,), (FIRST,), returned=[2])
    assert (verdict.blamed, verdict.have_returned) == ((2,), True)


def test_a_rank_whose_cause_has_not_answered_is_not_blamed():
    """Rank 2 holds the GIL. Rank 1 waits for it in a subgroup, and rank 0 waits for rank 1."""
    inner = waiting("barrier", 1, group="1", ranks=(1, 2), place="a.py:2 in f")
    verdict = verdict_of((FIRST, waiting("all_reduce", 2, 16)), (FIRST, inner))
    assert (verdict.blamed, verdict.is_complete) == ((), False)
    assert verdict.sentence.startswith("rank 1 waits in barrier #1 (group 1) at a.py:2 in f, but rank 0 waits for it in")


def test_the_root_of_a_rank_that_has_gone_on_is_not_known():
    ranks = (0, 1, 2, 3)
    calls = [(waiting("broadcast", 1, 4, ranks=ranks, root=root),) for root in (0, 1, 1)]
    verdict = verdict_of((call("broadcast", 1, 4, ranks=ranks),), *calls)
    assert (verdict.kind, verdict.blamed) == (VerdictKind.MISMATCH, ())


def test_the_last_collective_is_the_one_that_was_called_last():
    group = {"group": "1", "ranks": (0, 1)}
    history = (call("broadcast", 1, 4, **group), call("barrier", 6), call("all_reduce", 1, 4, **group))
    verdict = verdict_of((waiting("all_reduce", 7, 16, ranks=(0, 1)),), history)
    assert verdict.sentence.endswith("; its last collective was all_reduce #1")


def test_many_ranks_are_compared_in_a_moment():
    """The time grows with the number of ranks, not with its square: 1,024 ranks take half a second."""
    world = tuple(range(1024))
    calls = [tuple(call("all_reduce", number, 16, ranks=tuple(world)) for number in range(1, 9)) for _ in world]
    played = [(*of_rank, waiting("all_reduce", 9, 16, ranks=tuple(world))) for of_rank in calls[:-1]]
    before = time.process_time()
    assert verdict_of(*played, calls[-1]).blamed == (1023,)
    assert time.process_time() - before < 10


def test_a_hashed_name_of_a_group_is_shortened():
    assert waiting("barrier", 1, group="0123456789" * 4).group_title == "group 01234567"


def test_the_current_collective_is_the_one_that_waits():
    first, second, third = call("barrier", 1), waiting("all_reduce", 2, 4), call("barrier", 3)
    assert get_current_collective(RankCollectives(collectives=(first, second, third))) is second
    assert get_current_collective(RankCollectives(collectives=(first, third))) is third
    assert get_current_collective(RankCollectives()) is None


def test_answers_survive_json():
    odd = waiting("all_reduce", 2, 4, 4, root=1, reduce_op="SUM", place="é.py:2 in f", seconds=0.5)
    sent = answer(1, FIRST, odd, call("barrier", 3), place="a.py:1 in f", has_all=False, world="29500 1")
    assert RankCollectives.from_json(sent.to_json()) == sent
    assert RankCollectives.from_json(RankCollectives().to_json()) == RankCollectives()


@pytest.mark.parametrize("text", ["", "{}", "[]", "1", '{"place": "", "has_all": true, "collectives": [{}]}'])
def test_other_texts_are_refused(text):
    with pytest.raises((ValueError, KeyError, TypeError)):
        RankCollectives.from_json(text)


# --- torch's ranks and mpwatch's ---


def make_worlds(*worlds, late=()):
    """Return answers of worlds of two ranks each. The ranks wait in an all_reduce of another size, but for the late ones."""
    answers = {}
    for rank in range(2 * len(worlds)):
        calls = [] if rank in late else [waiting("all_reduce", 1, 4 + rank // 2, ranks=(0, 1))]
        answers[rank] = answer(rank % 2, *calls, world=worlds[rank // 2])
    return answers


def test_ranks_of_two_worlds_are_not_compared():
    assert find_verdict(make_worlds("29500 1", "29501 1")) is None


def test_the_rank_that_is_late_in_its_world_is_blamed():
    verdict = find_verdict(make_worlds("29500 1", "29501 1", late=[3]), returned=[0, 1])
    assert (verdict.blamed, verdict.have_returned) == ((3,), False)
    assert "in which rank 2 waits" in verdict.sentence


def test_nothing_is_said_of_worlds_that_cannot_be_told_apart():
    assert find_verdict(make_worlds("", "", late=[3])) is None


def test_the_user_may_number_the_ranks():
    """torch's rank 0 is mpwatch's rank 2. Rank 0 has returned, and is not in the group."""
    pair = {"group": "1", "ranks": (0, 1)}
    answers = {
        0: answer(2, call("barrier", 1)),
        1: answer(1, call("barrier", 1)),
        2: answer(0, waiting("all_reduce", 1, **pair)),
    }
    verdict = find_verdict(answers, returned=[0])
    assert (verdict.blamed, verdict.have_returned) == ((1,), False)


def test_groups_of_unknown_ranks_are_not_compared():
    """The user has made them without init_process_group: two groups may have the same name."""
    assert verdict_of((waiting("all_reduce", 1, 16, ranks=()),), (waiting("all_gather", 1, 4, ranks=()),)) is None


def test_a_rank_without_a_world_is_not_in_a_group():
    answers = answers_of((waiting("all_reduce", 1, 16),), ())
    assert find_verdict({**answers, 1: replace(answers[1], rank_in_world=None)}) is None


# --- Several findings ---


def test_all_stalls_are_found_the_longest_wait_first():
    pair, other = {"group": "1", "ranks": (0, 1)}, {"group": "2", "ranks": (2, 3)}
    answers = answers_of(
        (waiting("all_reduce", 3, 4, seconds=0.1, **pair),),
        (call("all_reduce", 2, 4, **pair),),
        (waiting("all_reduce", 31, 4, seconds=9.0, **other),),
        (call("all_reduce", 30, 4, **other),),
    )
    assert [verdict.blamed for verdict in find_verdicts(answers)] == [(3,), (1,)]
    assert [verdict.blamed for verdict in find_verdicts(answers, returned=[1])] == [(1,), (3,)]


def test_ranks_that_wait_for_one_another_are_found_beside_a_rank_that_is_late():
    pair, other = {"group": "1", "ranks": (0, 1)}, {"ranks": (2, 3)}
    answers = answers_of(
        (waiting("all_reduce", 3, 4, **pair),),
        (call("all_reduce", 2, 4, **pair),),
        (waiting("barrier", 1, group="2", **other),),
        (waiting("barrier", 1, group="3", **other),),
    )
    assert [verdict.kind for verdict in find_verdicts(answers)] == [VerdictKind.ABSENT, VerdictKind.CROSSED]


def test_one_warning_for_ranks_that_wait_in_several_groups_for_the_same_rank():
    answers = answers_of(
        (waiting("barrier", 1, group="1", ranks=(0, 2)),), (waiting("barrier", 1, group="2", ranks=(1, 2)),), ()
    )
    warned = set()
    stalls = find_verdicts(answers)
    assert [stall.blamed for stall in stalls] == [(2,), (2,)]
    assert select_new_stalls(stalls, warned) == stalls[:1]
    assert select_new_stalls(stalls, warned) == []
    assert select_new_stalls(stalls[1:], set()) == stalls[1:]


# --- Histories: ranks that run the same program, one of which deviates.

PROGRAM = st.lists(
    st.tuples(st.sampled_from(["all_reduce", "broadcast", "reduce", "barrier"]), st.integers(1, 4)), min_size=1, max_size=6
)


def play(programs):
    """Return the calls of each rank when no collective can end any more: one ends when all ranks have called it alike."""
    done = 0
    while all(len(program) > done for program in programs) and len({program[done] for program in programs}) == 1:
        done += 1
    played = []
    for program in programs:
        calls = [
            call(name, n, *([size] if name != "barrier" else []), ranks=tuple(range(len(programs))))
            for n, (name, size) in enumerate(program[: done + 1], 1)
        ]
        calls[done:] = [replace(last, state=WAITING) for last in calls[done:]]
        played.append(tuple(calls))
    return played


@given(PROGRAM, st.integers(3, 6), st.data())
def test_ranks_that_agree_have_no_verdict(program, nprocs, data):
    """The ranks are asked at different moments, so they have got to different places. Nobody is blamed for a mismatch."""
    played = play([program] * nprocs)
    cut = [calls[: data.draw(st.integers(0, len(calls)))] for calls in played]
    at = max(map(len, cut))
    cut = [tuple(replace(c, state=WAITING) if c.sequence > min(map(len, cut)) else c for c in calls) for calls in cut]
    verdict = verdict_of(*cut)
    assert verdict is None or verdict.kind is VerdictKind.ABSENT
    assert verdict is None or all(len(cut[rank]) < at for rank in verdict.blamed)


@given(PROGRAM, st.integers(3, 6), st.data())
def test_a_rank_that_deviates_is_blamed(program, nprocs, data):
    odd_rank, place = data.draw(st.integers(0, nprocs - 1)), data.draw(st.integers(0, len(program) - 1))
    change = data.draw(st.sampled_from(["size", "skip", "add"]))
    odd = list(program)
    if change == "size":
        odd[place] = (odd[place][0], odd[place][1] + 10)
    elif change == "skip":
        del odd[place]
    else:
        odd.insert(place, ("all_gather", 3))
    programs = [odd if rank == odd_rank else program for rank in range(nprocs)]
    first = next((n for n, pair in enumerate(zip(program, odd, strict=False)) if pair[0] != pair[1]), None)
    if first is None:  # it has called too few
        verdict = verdict_of(*play(programs), returned=[odd_rank])
        assert verdict.kind is VerdictKind.ABSENT
    else:
        verdict = verdict_of(*play(programs))
        if program[first][0] == odd[first][0] == "barrier":
            assert verdict is None  # barriers have no size
            return
        assert verdict.kind is VerdictKind.MISMATCH
    assert verdict.blamed == (odd_rank,)
    assert math.isfinite(verdict.seconds)
