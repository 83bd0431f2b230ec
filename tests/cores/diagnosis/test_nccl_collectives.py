"""What the flight recorder of NCCL says of a hang: its entries in, the verdict out. Only a GPU records such entries.

The form is that of torch 2.13: `torch/csrc/distributed/c10d/FlightRecorder.hpp`, and its tests in test_c10d_nccl.py.
"""

import pytest

from mpwatch import CollectiveState, torch_private
from mpwatch.watcher.diagnosis.collective_verdict import find_verdict
from mpwatch.worker import collectives

SECOND = 10**9  # nanoseconds
GROUPS = {
    "0": collectives._Group("default_pg", (0, 1, 2), 0),
    "3": collectives._Group("tensor parallel", (0, 2), 0),
}


def entry(name, number, *shapes, state="completed", group=("0", "default_pg"), is_p2p=False, record_id=None):
    """Return an entry of the recorder. It is the call `number` of its group."""
    shapes, is_over = list(map(list, shapes)), state == "completed"
    return {
        "record_id": number - 1 if record_id is None else record_id,
        "pg_id": int(group[0]),
        "process_group": group,
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": (number + is_p2p) * SECOND,
        "duration_ms": 0.1 if is_over else None,
        "input_sizes": shapes,
        "input_dtypes": ["BFloat16"] * len(shapes),
        "output_sizes": shapes,
        "output_dtypes": ["BFloat16"] * len(shapes),
        "state": state,
        "time_discovered_started_ns": None if state == "scheduled" else number * SECOND,
        "time_discovered_completed_ns": number * SECOND if is_over else None,
        "retired": is_over,
        "timeout_ms": 600_000,
        "is_p2p": is_p2p,
    }


@pytest.fixture
def answer(monkeypatch):
    """Return what a rank with these entries answers."""

    def answer(*entries, rank=0):
        monkeypatch.setattr(torch_private, "read_flight_recorder", lambda: list(entries))
        monkeypatch.setattr(collectives, "_groups", GROUPS)
        monkeypatch.setattr(collectives, "_torch_rank", rank)
        return collectives.describe_rank()

    return answer


def test_a_collective_of_nccl(answer):
    done, waiting = answer(
        entry("broadcast", 1, (8,)), entry("all_reduce", 2, (4, 16), (3,), state="started", group=("3", "tensor parallel"))
    ).collectives
    assert (done.name, done.sequence, done.backend, done.group, done.ranks) == ("broadcast", 1, "nccl", "default", (0, 1, 2))
    assert (done.state, done.input_shapes, done.input_dtypes) == (CollectiveState.COMPLETED, ((8,),), ("bfloat16",))
    assert (waiting.state, waiting.group, waiting.ranks) == (CollectiveState.WAITING, "3 (tensor parallel)", (0, 2))
    assert str(waiting) == "all_reduce #2 (bfloat16[4, 16] and 1 more, group 3 (tensor parallel))"


FIRST = entry("broadcast", 1, (8,))
STARTED = entry("all_reduce", 2, (16,), state="started")
GLOO, FIRST_OF_NCCL = FIRST | {"profiling_name": "gloo:broadcast"}, STARTED | {"collective_seq_id": 1}
UNEVEN_BATCHES = [  # NCCL never changes the state of the calls of a batch. This is how it gathers uneven tensors
    [
        *(entry("_broadcast_oop", 1, (size,), state="scheduled", record_id=number) for number in range(3)),
        entry("ALLGATHER_coalesced", 1, record_id=3),
    ]
    for size in (4, 5, 6)
]
SENDS = entry("send 0->1", 1, (4,), state="started", is_p2p=True)
RECEIVES_BATCH = [
    entry("recv 1<-0", 1, (4,), state="scheduled", is_p2p=True),
    entry("coalesced", 1, state="started", is_p2p=True),
]
POINT_TO_POINT = [[FIRST, SENDS], [FIRST, *RECEIVES_BATCH], [FIRST]]  # rank 2 takes no part

CASES = {
    # what the recorder of each rank has, the last call of each rank, the ranks that are blamed
    "absent": ([[FIRST, STARTED], [FIRST, STARTED], [FIRST]], ["all_reduce", "all_reduce", "broadcast"], (2,)),
    # each backend of a group numbers its calls
    "two backends": ([[GLOO, FIRST_OF_NCCL], [GLOO], [GLOO]], ["all_reduce", "broadcast", "broadcast"], (1, 2)),
    "batches": (UNEVEN_BATCHES, ["ALLGATHER_coalesced"] * 3, None),
    "point-to-point": (POINT_TO_POINT, ["send", "batch_isend_irecv", "broadcast"], None),
}


@pytest.mark.parametrize(("ranks", "last_calls", "blamed"), CASES.values(), ids=CASES)
def test_the_verdict(answer, ranks, last_calls, blamed):
    answers = {rank: answer(*entries, rank=rank) for rank, entries in enumerate(ranks)}
    assert [answers[rank].collectives[-1].name for rank in range(3)] == last_calls
    verdict = find_verdict(answers)
    assert (verdict and verdict.blamed) == blamed


def test_a_recorder_that_has_lost_the_first_calls_does_not_say_that_they_were_not_made(answer):
    assert not answer(entry("all_reduce", 300, (4,), record_id=299)).has_all
    assert answer(entry("all_reduce", 1, (4,))).has_all
