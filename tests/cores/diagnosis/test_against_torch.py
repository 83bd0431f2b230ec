"""Diagnosis compared with torch itself: the errors that its stores really raise, and its own comparison of two collectives."""

import datetime
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ProcessGroupGloo, TCPStore
from torch.distributed.flight_recorder.components.types import MatchState
from torch.distributed.flight_recorder.components.utils import match_one_event

import mpwatch
from mpwatch import Collective, CollectiveState
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.collective_verdict import find_verdict
from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, classify_exception
from mpwatch.wire.exceptions.encoder import ExceptionEncoder

SHORT = datetime.timedelta(seconds=0.5)


def gets_a_key_that_no_client_sets():
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=SHORT)
    store.get("missing key")


def loses_the_server_of_the_store():
    server = TCPStore("127.0.0.1", 0, is_master=True)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    for _ in range(2):
        client.set("key", "value")
        client.get("key")


def connects_to_a_store_without_a_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    TCPStore("127.0.0.1", port, is_master=False, timeout=SHORT)


def waits_for_clients_of_the_store():
    TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=datetime.timedelta(seconds=1), wait_for_workers=True)


def opens_a_store_at_a_used_port():
    with socket.create_server(("0.0.0.0", 0)) as server:
        TCPStore("127.0.0.1", server.getsockname()[1], is_master=True)


def uses_a_missing_gloo_device():
    ProcessGroupGloo.create_device(interface="no such device")


EXPECTED = {
    gets_a_key_that_no_client_sets: PeerErrorKind.PEER_TIMEOUT,
    loses_the_server_of_the_store: PeerErrorKind.CONNECTION_LOST,
    connects_to_a_store_without_a_server: PeerErrorKind.PEER_TIMEOUT,
    waits_for_clients_of_the_store: PeerErrorKind.PEER_TIMEOUT,
    opens_a_store_at_a_used_port: PeerErrorKind.HINT,
    uses_a_missing_gloo_device: None,
}


@pytest.mark.slow
def test_errors_of_torch_are_classified():
    def classify_errors(functions):
        """Runs in a rank, since torch leaves descriptors open."""
        found = {}
        for function in functions:
            try:
                function()
            except RuntimeError as error:
                found[function.__name__] = classify_exception(ExceptionEncoder(error).plain())
        return found

    (found,) = mpwatch.run(classify_errors, 1, args=(list(EXPECTED),))
    assert found == {function.__name__: kind for function, kind in EXPECTED.items()}


NAMES = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "barrier"]
CALLS = st.tuples(st.sampled_from(NAMES), st.integers(1, 3), st.sampled_from(["Float", "Long"]))


def make_entry(name, size, dtype):
    """Return an entry of torch's recorder."""
    sizes = {"all_gather": ([[size]], [[2, size]]), "reduce_scatter": ([[2, size]], [[size]]), "barrier": ([[]], [[]])}
    inputs, outputs = sizes.get(name, ([[size]], [[size]]))
    entry = {"profiling_name": f"gloo:{name}", "state": "scheduled", "process_group": ("0", "default_pg")}
    entry |= {"input_sizes": inputs, "output_sizes": outputs, "input_dtypes": [dtype], "output_dtypes": [dtype]}
    return entry | {"collective_seq_id": 1, "p2p_seq_id": 0, "time_created_ns": 0}


def make_answer(entry, rank):
    collective = Collective(
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
    return RankCollectives(collectives=(collective,), rank_in_world=rank)


@given(CALLS, CALLS)
def test_a_mismatch_is_what_torch_calls_one(one, other):
    entries = [make_entry(*one), make_entry(*other)]
    theirs = match_one_event(*entries, {"0": {0, 1}}, "0").state is not MatchState.FULLY_MATCHED
    if one[0] == other[0] == "barrier":
        theirs = False  # a barrier has no tensors; torch compares types that it never has
    answers = {rank: make_answer(entry, rank) for rank, entry in enumerate(entries)}
    assert (find_verdict(answers) is not None) == theirs
