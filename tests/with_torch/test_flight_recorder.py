"""Ranks answer which collectives they have called, also while they crash. What the user has set stays."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.flight_recorder.components.types import MatchState
from torch.distributed.flight_recorder.components.utils import match_one_event

import mpwatch
from mpwatch import Collective, CollectiveState, FailureKind
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.collective_verdict import find_verdict
from with_torch import recorder_functions as functions

FIRST_VERDICT = "rank 2 has not joined broadcast #1 (int64[2, 3], default group), in which rank 0 waits"


@pytest.mark.parametrize("signum", [signal.SIGABRT, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_crash_with_a_process_group_is_reported_as_any_other(signum):
    with pytest.raises(mpwatch.RunFailedError) as failed:
        mpwatch.run(functions.crash, 2, args=(signum,), grace_period=0.5)
    root = failed.value.root_cause
    assert (root.rank, root.kind, root.signal) == (1, FailureKind.SIGNAL, signum)
    assert re.search(r'recorder_functions.py", line \d+ in crash', root.stack)


@pytest.mark.slow
def test_a_file_of_the_user_gets_the_crash(tmp_path):
    with pytest.raises(mpwatch.RunFailedError) as failed:
        mpwatch.run(functions.crash_into, 2, args=(str(tmp_path / "crash"),), grace_period=0.5)
    assert (failed.value.root_cause.rank, failed.value.root_cause.signal) == (1, signal.SIGABRT)
    assert "in crash_into" in (tmp_path / "crash").read_text()


@pytest.mark.slow
def test_a_crash_of_a_fork_is_no_crash_of_the_rank():
    assert list(mpwatch.run(functions.crash_in_a_fork, 2)) == [-signal.SIGABRT] * 2


@pytest.mark.slow
def test_a_rank_without_a_process_group_has_no_thread():
    result = mpwatch.run(functions.get_threads, 1, args=(False,))
    assert result[0] == (["MainThread"], "128")
    result = mpwatch.run(functions.get_threads, 1, args=(True,), env={"TORCH_FR_BUFFER_SIZE": "7"})
    assert result[0] == (["MainThread", "mpwatch collectives"], "7")


@pytest.mark.parametrize("size", ["100", pytest.param("0", marks=pytest.mark.slow)])
def test_the_result_has_the_collectives(size):
    """A recorder that the user has switched off records nothing, and the stacks remain."""
    env = {"TORCH_FR_BUFFER_SIZE": size}
    with mpwatch.WorkerGroup(3, backend="gloo", grace_period=0.5, env=env) as group:
        group.run(functions.rank)
        with ThreadPoolExecutor(1) as thread, pytest.raises(mpwatch.RunTimeoutError) as failed:
            stacks = thread.submit(wait_for_verdict, group, FIRST_VERDICT if size != "0" else "")
            group.run(functions.wait_in_calls, timeout=4.0)
    found = failed.value.result.collectives
    assert failed.value.result.stacks[0]
    if size == "0":
        assert found == {}
        return
    first, second = found[0], found[1]
    assert (first.name, first.sequence, first.group, first.ranks, first.root) == ("broadcast", 1, "default", (0, 1, 2), 2)
    assert (first.input_shapes, first.input_dtypes) == (((2, 3),), ("int64",))
    assert re.fullmatch(r"recorder_functions\.py:\d+ in wait_in_calls", first.place)
    assert (second.name, second.group, second.ranks) == ("reduce", "1 (pair)", (0, 1))
    assert (second.root, second.reduce_op) == (0, "MAX")
    assert {first.state, second.state} == {CollectiveState.WAITING}
    assert 2 not in found
    assert FIRST_VERDICT in str(failed.value)
    assert stacks.result().collectives[0] == first
    assert str(stacks.result()).splitlines()[-1] == stacks.result().verdict


def wait_for_verdict(group, verdict):
    """Return the first stacks that come with this verdict."""
    while True:
        stacks = group.stacks()
        if verdict in stacks.verdict and len(stacks) == 3:
            return stacks


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_does_not_answer():
    with pytest.raises(mpwatch.RunTimeoutError) as failed:
        mpwatch.run(functions.hold_the_gil, 2, timeout=15.0, grace_period=0.5)
    assert set(failed.value.result.collectives) == {0}


def test_groups_that_were_destroyed():
    """torch gives a group that all its ranks make without the others the name of one that was destroyed.

    The ranks of a group are known until there is a new world. The calls of the new one have the same numbers.
    """
    ((same_name, worlds),) = mpwatch.run(functions.get_calls_of_groups, 1)
    first, second = same_name
    ((_, name, number),) = set(first) - {("barrier #1", "default", 1)}
    assert number == 1
    assert second == [("barrier #1", "default", 1), ("all_reduce #1", name, 2)]

    before, destroyed, after = worlds
    assert before[1:] == (0, [("barrier #1", (0,)), ("all_reduce #1", (0,)), ("all_reduce #2", (0,))])
    assert destroyed == before
    assert after[1:] == (0, [("all_reduce #1", ()), ("broadcast #1", (0,))])
    assert re.fullmatch(r"\d+ 1", before[0])  # the port of the store
    assert after[0] == " 1"  # a HashStore has none


def test_a_rank_may_close_all_its_descriptors():
    assert list(mpwatch.run(functions.close_all, 2)) == [0, 1]


# --- torch's own comparison of two entries

NAMES = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "barrier"]
ENTRIES = st.tuples(st.sampled_from(NAMES), st.integers(1, 3), st.sampled_from(["Float", "Long"]))


def make_entry(name, size, dtype):
    inputs, outputs = [[size]], [[size]]
    if name == "all_gather":
        outputs = [[2, size]]
    elif name == "reduce_scatter":
        inputs = [[2, size]]
    elif name == "barrier":
        inputs, outputs = [[]], [[]]
    return {
        "profiling_name": f"gloo:{name}",
        "state": "scheduled",
        "process_group": ("0", "default_pg"),
        "input_sizes": inputs,
        "output_sizes": outputs,
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "time_created_ns": 0,
    }


def make_collective(entry):
    return Collective(
        name=entry["profiling_name"][5:],
        sequence=1,
        group="default",
        ranks=(0, 1),
        state=CollectiveState.WAITING,
        input_shapes=tuple(map(tuple, entry["input_sizes"])),
        output_shapes=tuple(map(tuple, entry["output_sizes"])),
        input_dtypes=tuple(entry["input_dtypes"]),
        output_dtypes=tuple(entry["output_dtypes"]),
    )


@given(ENTRIES, ENTRIES)
def test_a_mismatch_is_what_torch_calls_one(one, other):
    entries = [make_entry(*one), make_entry(*other)]
    theirs = match_one_event(*entries, {"0": {0, 1}}, "0").state is not MatchState.FULLY_MATCHED
    answers = {
        rank: RankCollectives(collectives=(make_collective(entry),), rank_in_world=rank)
        for rank, entry in enumerate(entries)
    }
    if one[0] == other[0] == "barrier":
        theirs = False  # a barrier has no tensors; torch compares types that it never has
    assert (find_verdict(answers) is not None) == theirs
