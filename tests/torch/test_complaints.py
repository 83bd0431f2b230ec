"""What torch's stores and gloo really say of peers that have gone, that are late, and of other trouble."""

import datetime
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import mpwatch
from mpwatch.watcher.diagnosis.peer_errors import PeerErrorKind, classify_exception
from mpwatch.wire.exceptions.encoder import ExceptionEncoder

pytestmark = pytest.mark.usefixtures("_wait_for_all_stacks")
SHORT = datetime.timedelta(seconds=0.5)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def store_gets_what_nobody_sets():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=SHORT)
    store.get("nobody sets this")


def store_has_lost_its_server():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    for _ in range(2):
        client.set("key", "value")
        client.get("key")


def store_without_a_server():
    dist.TCPStore("127.0.0.1", free_port(), is_master=False, timeout=SHORT)


def store_waits_for_clients():
    dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=datetime.timedelta(seconds=1), wait_for_workers=True)


def store_s_port_is_taken():
    with socket.create_server(("0.0.0.0", 0)) as server:
        dist.TCPStore("127.0.0.1", server.getsockname()[1], is_master=True)


def gloo_has_no_such_device():
    dist.ProcessGroupGloo.create_device(interface="no such device")


EXPECTED = {
    store_gets_what_nobody_sets: PeerErrorKind.PEER_TIMEOUT,
    store_has_lost_its_server: PeerErrorKind.CONNECTION_LOST,
    store_without_a_server: PeerErrorKind.PEER_TIMEOUT,
    store_waits_for_clients: PeerErrorKind.PEER_TIMEOUT,
    store_s_port_is_taken: PeerErrorKind.HINT,
    gloo_has_no_such_device: None,
}


def test_what_torch_says():
    def complaints(fails):
        """In a rank, since torch leaves descriptors open."""
        found = {}
        for fail in fails:
            try:
                fail()
            except RuntimeError as error:
                found[fail.__name__] = classify_exception(ExceptionEncoder(error).plain())
        return found

    (found,) = mpwatch.run(complaints, 1, args=(list(EXPECTED),))
    assert found == {fail.__name__: complaint for fail, complaint in EXPECTED.items()}


def hangs(how):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1.5))
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        how()
    dist.all_reduce(torch.ones(1))


def wait_for_godot():
    import threading

    threading.Event().wait()


def suspend_myself():
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("how", "where"),
    [(wait_for_godot, "in wait (test_complaints.py:"), (suspend_myself, "(suspended, by SIGSTOP or SIGTSTP)")],
)
def test_the_rank_that_keeps_its_peers_waiting_is_to_blame(how, where):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(hangs, 3, args=(how,))
    root = caught.value.root_cause
    assert (root.rank, root.kind, root.is_secondary) == (1, mpwatch.FailureKind.HANG, False)
    verdict, *others = str(caught.value).splitlines()
    assert verdict.startswith(f"rank 1 kept its peers waiting until they timed out: still at work {where}")
    assert others
    assert all("a victim of rank 1: RuntimeError" in line or "stopped by the watcher" in line for line in others)


def test_ranks_that_wait_for_one_another_blame_nobody():
    """Each waits in a collective of its own: no rank is away."""

    def deadlock():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1.5))
        me = dist.get_rank()
        groups = [dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1.5 + 60 * n)) for n in range(2)]
        dist.all_reduce(torch.ones(1), group=groups[me])

    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(deadlock, 2)
    assert str(caught.value).startswith("no rank was seen to fail by itself; the first to report a lost or late peer: rank 0: ")
    assert "  rank 1: stopped by the watcher in all_reduce (test_complaints.py:" in str(caught.value)
