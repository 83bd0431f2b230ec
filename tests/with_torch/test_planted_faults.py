"""Ranks call collectives that do not fit together. The report names the rank, the collective and the line.

`tox run -e faults` plants each fault twenty times, in 3 ranks and in 8.
"""

import re

import pytest

import mpwatch
from mpwatch import FailureKind
from support.thoroughness import THOROUGH, choose
from with_torch import planted_faults as faults
from with_torch.planted_faults import ODD_RANK

SLOW = pytest.mark.slow
LINE = r"\(planted_faults\.py:\d+ in \w+(<lambda>)?\)"
OTHERS = r"ranks? \d[\d, -]*"  # on a busy machine some ranks may not answer in time
# What the first line of the report says of rank 1, and of the other ranks.
VERDICTS = {
    faults.other_shape: rf"called all_reduce #3 with float32\[17\] {LINE}, {OTHERS} with float32\[16\] {LINE}",
    faults.other_operation: rf"called broadcast #3 with float32\[16\] {LINE}, {OTHERS} all_reduce #3 with float32\[16\] {LINE}",
    faults.missing_call: rf"called broadcast #3 with float32\[8\] {LINE}, {OTHERS} all_reduce #3 with float32\[16\] {LINE}",
    faults.early_return: rf"has returned, but .* for it in all_reduce #3 \(float32\[16\], default group\) {LINE}; "
    "its last collective was all_reduce #2",
    faults.uneven_inputs_of_fsdp: rf"has returned, but .* for it in all_gather #\d+ \(float32\[\d+\], default group\) {LINE}",
    faults.uneven_inputs_of_ddp: rf"has returned, but .* for it in all_reduce #\d+ \(float32\[20\], default group\) {LINE}",
}
MARKS = {faults.other_shape: (), faults.missing_call: SLOW, faults.early_return: SLOW, faults.uneven_inputs_of_ddp: SLOW}


def gloo(stall_after):
    return mpwatch.Backend("gloo", stall_after=stall_after)


def run(fault, nprocs):
    with pytest.raises(mpwatch.RunFailedError) as failed:
        mpwatch.run(faults.run_fault, nprocs, args=(fault,), backend=gloo(2.0), grace_period=0.5)
    return failed.value


@pytest.mark.parametrize(
    ("fault", "nprocs"),
    [
        *(pytest.param(fault, 3, marks=MARKS.get(fault, THOROUGH)) for fault in VERDICTS),
        *(pytest.param(fault, 8, marks=THOROUGH) for fault in VERDICTS),
    ],
)
def test_the_rank_that_does_not_fit_is_blamed(fault, nprocs):
    error = run(fault, nprocs)
    root, collectives = error.root_cause, error.result.collectives
    assert re.match(f"rank {ODD_RANK} {VERDICTS[fault]}", str(error)), str(error)
    assert (root.rank, root.kind, root.is_secondary) == (ODD_RANK, FailureKind.MISMATCH, False)
    assert all(failure.is_secondary for rank, failure in error.result.failures.items() if rank != ODD_RANK)
    assert {collective.group for collective in collectives.values()} == {"default"}
    assert root.collective == collectives[ODD_RANK]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "nprocs", "text"),
    [
        # the recorder does not know the root, so a rank that has gone on says nothing about it
        (faults.wrong_root, 3, rf"rank 0 called broadcast #3 with root 0 {LINE}, rank 1 with root 1 {LINE}"),
        (
            faults.other_operation,
            2,
            rf"rank 0 called all_reduce #3 with float32\[16\] {LINE}, rank 1 broadcast #3 with float32\[16\] {LINE}\n",
        ),
    ],
)
def test_all_are_named_and_nobody_is_blamed_if_it_cannot_be_known_who_is_wrong(fault, nprocs, text):
    error = run(fault, nprocs)
    assert re.match(text, str(error)), str(error)
    assert error.root_cause is None or error.root_cause.is_secondary
    assert all(failure.is_secondary for failure in error.result.failures.values())


@pytest.mark.slow
def test_ranks_that_wait_in_different_groups_are_named(caplog):
    """This may be legal: a call may be asynchronous. So the run goes on until its timeout."""
    with mpwatch.WorkerGroup(3, backend=gloo(1.0), grace_period=0.5) as group:
        group.run(faults.load_slowly, (0.0,))  # the start takes longer on a busy machine
        with pytest.raises(mpwatch.RunTimeoutError) as failed:
            group.run(faults.run_fault, (faults.other_group,), timeout=8.0)
    text = r"rank 1 waits in all_reduce #1 \(float32\[16\], group 1\) at planted_faults.*, but ranks 0, 2 wait for it in all_reduce"
    assert re.search(text, str(failed.value)), str(failed.value)
    assert re.search(text, caplog.text), caplog.text


@pytest.mark.slow
def test_a_late_rank_is_named_in_a_warning(caplog):
    result = mpwatch.run(faults.load_slowly, 2, args=(2.0,), backend=gloo(1.0))
    assert list(result) == [0, 1]
    texts = [record.getMessage() for record in caplog.records]  # on a busy machine others may be late for other collectives
    (text,) = [text for text in texts if "rank 1 has not joined all_reduce #2" in text]
    assert re.match(r"ranks have waited for \d s in a collective: rank 1 has not joined", text), text
    assert re.search(r"; rank 1 is at planted_faults.py:\d+ in load_slowly$", text), text


@pytest.mark.slow
def test_a_group_ends_a_call_that_cannot_end():
    with mpwatch.WorkerGroup(3, backend=gloo(2.0), grace_period=0.5) as group:
        for _ in range(2):
            with pytest.raises(mpwatch.RunFailedError, match=r"^rank 1 called broadcast #3 with"):
                group.run(faults.run_fault, (faults.other_operation,))
        assert list(group.run(faults.load_slowly, (0.0,))) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sound_training_with_delays_raises_no_alarm(caplog):
    """No delay is longer than half of `stall_after`."""
    with mpwatch.WorkerGroup(4, backend=gloo(0.6)) as group:
        for seed in range(choose(10, 500)):
            assert list(group.run(faults.train_with_delays, (seed, 0.3))) == [[4, 4, 4, 4]] * 4
    assert not caplog.records
