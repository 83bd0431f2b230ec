"""The errors that torch's stores and gloo raise for peers that are lost or late, and for other reasons."""

import datetime
import re
import socket

import pytest
import torch
import torch.distributed as dist

import mpwatch
from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, classify_exception
from mpwatch.wire.exceptions.encoder import ExceptionEncoder
from support.ports import free_port

pytestmark = pytest.mark.usefixtures("_wait_for_all_stacks")
SHORT = datetime.timedelta(seconds=0.5)


def gets_a_key_that_no_client_sets():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=SHORT)
    store.get("missing key")


def loses_the_server_of_the_store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    for _ in range(2):
        client.set("key", "value")
        client.get("key")


def connects_to_a_store_without_a_server():
    dist.TCPStore("127.0.0.1", free_port(), is_master=False, timeout=SHORT)


def waits_for_clients_of_the_store():
    dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=datetime.timedelta(seconds=1), wait_for_workers=True)


def opens_a_store_at_a_used_port():
    with socket.create_server(("0.0.0.0", 0)) as server:
        dist.TCPStore("127.0.0.1", server.getsockname()[1], is_master=True)


def uses_a_missing_gloo_device():
    dist.ProcessGroupGloo.create_device(interface="no such device")


EXPECTED = {
    gets_a_key_that_no_client_sets: PeerErrorKind.PEER_TIMEOUT,
    loses_the_server_of_the_store: PeerErrorKind.CONNECTION_LOST,
    connects_to_a_store_without_a_server: PeerErrorKind.PEER_TIMEOUT,
    waits_for_clients_of_the_store: PeerErrorKind.PEER_TIMEOUT,
    opens_a_store_at_a_used_port: PeerErrorKind.HINT,
    uses_a_missing_gloo_device: None,
}


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


def limit_collectives(seconds, group=None):
    """Set the timeout of later collectives. All ranks have joined by then, which may take long on a busy machine."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def hangs_on_rank_1(hang):
    dist.init_process_group("gloo")
    dist.barrier()
    limit_collectives(1.5)
    if dist.get_rank() == 1:
        hang()
    dist.all_reduce(torch.ones(1))


def wait_without_end():
    import threading

    threading.Event().wait()


def suspend_itself():
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("hang", "nprocs", "verdict"),
    [
        (
            wait_without_end,
            3,
            (
                r"has not joined all_reduce #2 \(float32\[1\], default group\), in which ranks 0, 2 wait \(test_complaints.py:.*\)"
                r"; its last collective was barrier #1: still at work in wait \(test_complaints.py:"
            ),
        ),
        pytest.param(
            suspend_itself,  # it cannot be asked
            2,
            r"kept its peers waiting until they timed out: still at work \(suspended, by SIGSTOP or SIGTSTP\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_rank_that_keeps_its_peers_waiting_is_the_root_cause(hang, nprocs, verdict):
    with pytest.raises(mpwatch.RunFailedError, match=f"^rank 1 {verdict}") as caught:
        mpwatch.run(hangs_on_rank_1, nprocs, args=(hang,))
    root = caught.value.root_cause
    assert (root.rank, root.kind, root.is_secondary) == (1, mpwatch.FailureKind.HANG, False)
    _, *others = str(caught.value).splitlines()
    assert others
    assert all(" of rank 1: RuntimeError" in line or "stopped by the watcher" in line for line in others)


@pytest.mark.slow
def test_ranks_that_wait_for_one_another_have_no_root_cause():
    """Each rank waits in a collective of another group, so neither is to blame."""

    def deadlock():
        dist.init_process_group("gloo")
        me = dist.get_rank()
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        dist.barrier()
        for n, group in enumerate(groups):
            limit_collectives(1.5 + 60 * n, group)
        dist.all_reduce(torch.ones(1), group=groups[me])

    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(deadlock, 2)
    place = r"at test_complaints\.py:\d+ in deadlock"
    assert re.match(
        rf"rank 0 waits in all_reduce #1 \(float32\[1\], group 1\) {place}, rank 1 waits in all_reduce #1 "
        rf"\(float32\[1\], group 2\) {place}: they wait for one another\n",
        str(caught.value),
    )
    assert caught.value.root_cause is None
    assert "  rank 1: stopped by the watcher in all_reduce (test_complaints.py:" in str(caught.value)
