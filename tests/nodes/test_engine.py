"""RendezvousClient: nodes join rounds on the loopback device, and each obstacle is reported."""

import dataclasses
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from mpwatch import LaunchError
from mpwatch.multinode.rendezvous import open_store, store
from mpwatch.multinode.rendezvous.cancellable_wait import Deadline
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.endpoint import Endpoint
from mpwatch.multinode.rendezvous.errors import CancelledError, JobClosedError, StoreLostError
from mpwatch.multinode.rendezvous.rounds import WaitReport
from mpwatch.multinode.rendezvous.torch_state import State, load_state
from mpwatch.options.rendezvous import Rendezvous
from support.programs import ENV

LONE_NODE = Path(__file__).parent / "lonely.py"
SHORT_LAST_CALL = 0.2  # seconds


@pytest.fixture(scope="module", autouse=True)
def _torch_descriptors():
    """Torch's first store of a process leaves three descriptors of its event loops open, for later stores."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gc.collect()


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def make_client(port):
    """Makes clients of one job. They are closed after the test, the one that serves the store last."""
    clients = []

    def make(nnodes=2, **options):
        given = {"endpoint": f"127.0.0.1:{port}", "run_id": "job", "node_timeout": 60, **options}
        clients.append(RendezvousClient(Rendezvous(given.pop("endpoint"), given.pop("run_id"), nnodes, **given)))
        return clients[-1]

    yield make
    for client in sorted(clients, key=lambda client: client.is_host):
        client.close()
    gc.collect()


def deadline_in(seconds):
    return time.monotonic() + seconds


def run_together(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def join(*clients, last_call=SHORT_LAST_CALL):
    return run_together(*(lambda client=client: client.join(deadline_in(30), last_call=last_call) for client in clients))


def connect(*clients):
    for client in clients:
        client.connect(deadline_in(10))
    return clients


def read_state(client):
    response = client._opened_store.backend.get_state()
    return State() if response is None else load_state(response[0])


@contextmanager
def in_background(call):
    """What the call raises is raised at the end of the block."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        yield future
        future.result()


def test_two_nodes_join_a_round_and_share_its_store(make_client, eventually):
    host, guest = connect(make_client(), make_client())
    assert (host.is_host, guest.is_host) == (True, False)
    assert host.address == guest.address == "127.0.0.1"
    first, second = join(host, guest)
    assert {first.group_rank, second.group_rank} == {0, 1}
    assert first.group_world_size == second.group_world_size == 2
    first.store.set("key", b"\0value")
    eventually(lambda: second.store.check(["key"]))  # torch's `set` does not wait for the server
    assert not second.store.check(["key", "more"])
    assert second.store.get("key") == b"\0value"
    assert [first.store.add("count", 2), second.store.add("count", 3)] == [2, 5]
    assert dist.PrefixStore("apart", first.store).add("count", 1) == 1
    assert (first.store.delete_key("key"), second.store.check(["key"])) == (True, False)


def test_the_store_of_a_round_limits_the_size_of_a_value(make_client):
    (host,) = connect(make_client(1))
    (formed,) = join(host)
    with pytest.raises(ValueError, match="the store takes at most 8388608 bytes in one value, not 8388609"):
        formed.store.set("key", b"x" * (store.MAX_VALUE_BYTES + 1))
    formed.store.set("key", b"x" * store.MAX_VALUE_BYTES)
    assert len(formed.store.get("key")) == store.MAX_VALUE_BYTES


def list_listeners():
    """The sockets on which this process listens, by inode."""
    inodes = {os.fstat(int(fd)).st_ino for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return inodes & {int(fields[9]) for fields in lines if fields[3] == "0A"}


def test_torch_opens_no_further_store(make_client):
    host, guest = connect(make_client(), make_client())
    join(host, guest)
    assert len(list_listeners()) == 1


def test_a_newcomer_is_counted_and_joins_the_next_round(make_client, eventually):
    host, guest, newcomer = connect(make_client((2, 3)), make_client((2, 3)), make_client((2, 3)))
    old = join(host, guest)
    assert guest.count_waiting_nodes() == 0
    with in_background(lambda: newcomer.join(deadline_in(30), last_call=SHORT_LAST_CALL)) as joining:
        eventually(lambda: host.count_waiting_nodes() == guest.count_waiting_nodes() == 1)
        rounds = [*join(host, guest), joining.result()]
    assert {formed.group_rank for formed in rounds} == {0, 1, 2}
    assert {formed.group_world_size for formed in rounds} == {3}
    old[0].store.set("key", "value")
    assert not rounds[0].store.check(["key"])


def test_no_node_waits_for_one_that_has_left(make_client):
    host, guest = connect(make_client((1, 2)), make_client((1, 2)))
    join(host, guest, last_call=20)
    guest.close()
    assert host.join(deadline_in(10), last_call=SHORT_LAST_CALL).group_world_size == 1


def test_the_heartbeat_thread_has_gone_from_the_kernel_after_the_stop(make_client):
    """Without the wait, the kernel still lists the thread once in ten times."""
    (client,) = connect(make_client(1))
    handler = client._implementation._handler
    for _ in range(100):
        handler._start_heartbeats()
        number = handler._keep_alive_timer._thread.native_id
        handler.stop_heartbeats()
        assert not os.path.exists(f"/proc/self/task/{number}")


def test_a_node_without_heartbeats_is_dropped(make_client):
    host, guest = connect(make_client((1, 2), node_timeout=2), make_client((1, 2), node_timeout=2))
    join(host, guest, last_call=20)
    guest._implementation._handler.stop_heartbeats()
    started = time.monotonic()
    assert host.join(deadline_in(20), last_call=SHORT_LAST_CALL).group_world_size == 1
    assert time.monotonic() - started < 2 + 4  # torch polls once a second, and once more at the start


def test_a_cancelled_join_leaves_nothing_in_the_state(make_client, eventually):
    (host,) = connect(make_client())
    with pytest.raises(CancelledError), in_background(lambda: host.join(deadline_in(60))):
        eventually(lambda: read_state(host).participants)
        cancelled = time.monotonic()
        host.cancel()
    assert time.monotonic() - cancelled < 1.5
    state = read_state(host)
    assert not state.participants
    assert not state.last_heartbeats
    with pytest.raises(CancelledError):
        host.join(deadline_in(60))


def test_a_connect_can_be_cancelled(make_client, eventually):
    client = make_client(is_host=False)
    threads = threading.active_count()
    with pytest.raises(CancelledError), in_background(lambda: client.connect(deadline_in(60))):
        eventually(lambda: threading.active_count() > threads)
        cancelled = time.monotonic()
        client.cancel()
    assert time.monotonic() - cancelled < 1.5


def test_too_few_nodes_are_an_error(make_client):
    (host,) = connect(make_client((3, 4)))
    with pytest.raises(LaunchError, match=r"job 'job' at 127\.0\.0\.1:\d+: 1 of 3 nodes had joined after \d\.\d s\. Check"):
        host.join(deadline_in(1))
    assert not read_state(host).participants


@pytest.mark.parametrize("options", [{}, {"backend": "static", "options": {"rank": 0}}], ids=["c10d", "static"])
def test_a_node_that_waits_for_others_reports_it_once(make_client, options):
    (host,) = connect(make_client(3, **options))
    counts = []
    with pytest.raises(LaunchError):
        host.join(deadline_in(1), wait_report=WaitReport(deadline_in(0.3), counts.append))
    assert counts == [1]


def test_a_node_that_could_begin_alone_reports_no_wait(make_client):
    (host,) = connect(make_client((1, 2)))
    assert (
        host.join(deadline_in(30), last_call=0.5, wait_report=WaitReport(deadline_in(0), pytest.fail)).group_world_size == 1
    )


def test_a_node_beyond_the_maximum_is_an_error(make_client):
    host, guest, surplus = connect(make_client(), make_client(), make_client())
    join(host, guest)
    with pytest.raises(LaunchError, match=r"the job has its maximum number of nodes \(2\)"):
        surplus.join(deadline_in(1))
    assert not read_state(host).redundancy_list


def test_a_job_that_never_takes_the_newcomer_in_is_an_error(make_client):
    host, newcomer = connect(make_client((1, 2)), make_client((1, 2)))
    join(host)
    with pytest.raises(LaunchError, match="the job runs on 1 of at most 2 nodes and has not taken in this node"):
        newcomer.join(deadline_in(1))
    assert not read_state(host).wait_list


def test_no_node_joins_a_job_that_is_over(make_client):
    host, guest = connect(make_client((1, 2)), make_client((1, 2)))
    join(host)
    host.set_closed()
    with pytest.raises(JobClosedError, match="closed: that job is over"):
        guest.join(deadline_in(10))


def test_a_round_that_a_node_has_just_left_is_not_complete(make_client):
    """Torch would return rank 1 of 1."""
    host, guest = connect(make_client((1, 2)), make_client((1, 2)))
    join(host, guest, last_call=20)
    implementation = guest._implementation
    implementation._on_state(read_state(host))
    state = read_state(host)
    (first,) = (participant for participant, rank in state.participants.items() if rank == 0)
    del state.participants[first]
    implementation._on_state(state)
    assert not implementation._is_still_complete(dataclasses.make_dataclass("Info", ["world_size"])(1))


def test_a_name_that_cannot_be_resolved_is_an_error(make_client):
    with pytest.raises(LaunchError, match=r"the name 'nowhere\.invalid' cannot be resolved .* give the address instead"):
        make_client(endpoint="nowhere.invalid:29400").connect(deadline_in(1))


def test_a_port_without_a_listener_is_an_error(make_client, port):
    started = time.monotonic()
    with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port}: nothing listens there\. .* is_host=True"):
        make_client(is_host=False).connect(deadline_in(1))
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("is_host", [True, None])
def test_a_port_that_a_silent_program_has_taken_is_an_error(make_client, port, is_host):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(LaunchError, match=f"port {port} is taken"):
        make_client(is_host=is_host).connect(deadline_in(30))


def test_a_listener_that_never_answers_is_an_error(make_client, port):
    started = time.monotonic()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(LaunchError, match=r"does not answer as torch's store\. Check on that machine whether another"),
    ):
        make_client(is_host=False).connect(deadline_in(1))
    assert time.monotonic() - started < 3


def test_a_listener_that_is_another_program_is_an_error(make_client, port):
    def answer():
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(1 << 10)

    taken = pytest.raises(LaunchError, match=f"port {port} is taken by a program that does not answer")
    with socket.create_server(("127.0.0.1", port)) as server, in_background(answer), taken:
        make_client(is_host=False).connect(deadline_in(60))


def test_the_host_may_start_last(make_client):
    guest = make_client(is_host=False)
    with in_background(lambda: guest.connect(deadline_in(30))):
        make_client(is_host=True).connect(deadline_in(30))


def test_a_host_given_by_name_serves_the_store_at_all_its_addresses(make_client, port):
    host, guest = connect(make_client(endpoint=f"localhost:{port}"), make_client(endpoint=f"127.0.0.1:{port}"))
    assert (host.is_host, host.address, guest.is_host) == (True, "localhost", False)
    assert {formed.group_world_size for formed in join(host, guest)} == {2}


def test_local_addr_is_the_address_of_the_node(make_client):
    (host,) = connect(make_client(local_addr="node7.cluster"))
    assert host.address == "node7.cluster"


def test_static_nodes_have_the_ranks_of_their_options(make_client):
    nodes = [make_client(2, backend="static", options={"rank": rank}) for rank in (1, 0)]
    run_together(*(lambda client=client: client.connect(deadline_in(20)) for client in nodes))
    assert [client.is_host for client in nodes] == [False, True]
    for _ in range(2):
        rounds = join(*nodes)
        assert [(formed.group_rank, formed.group_world_size) for formed in rounds] == [(1, 2), (0, 2)]
        assert rounds[0].store.add("new in each round", 1) == 1
    assert nodes[0].count_waiting_nodes() == 0
    nodes[1].set_closed()
    with pytest.raises(JobClosedError):
        nodes[0].join(deadline_in(20))


def test_a_missing_static_node_is_an_error(make_client):
    (host,) = connect(make_client(3, backend="static", options={"rank": 0}))
    for _ in range(2):  # the first try has left no entry
        with pytest.raises(LaunchError, match=r"nodes with these ranks had not joined: 1, 2\."):
            host.join(deadline_in(0.5))


def test_a_static_rank_that_joins_twice_is_an_error(make_client):
    host, guest, twin = connect(*(make_client(2, backend="static", options={"rank": rank}) for rank in (0, 1, 1)))
    join(host, guest)
    with pytest.raises(LaunchError, match=r"options=\{'rank': 1\} has already joined"):
        twin.join(deadline_in(20))


def test_close_leaves_no_thread_and_no_server(make_client, port):
    host, guest = connect(make_client(), make_client())
    formed, _ = join(host, guest)
    guest.close()
    host.close()
    host.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("mpwatch", "Rendezvous"))]
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
    with pytest.raises(StoreLostError, match="this node has closed the connection"):
        formed.store.check(["key"])


def test_a_static_host_keeps_the_store_until_the_others_have_left(make_client, monkeypatch):
    monkeypatch.setattr("mpwatch.multinode.rendezvous.client.OTHERS_LEAVE_SECONDS", 30.0)
    host, guest = connect(*(make_client(2, backend="static", options={"rank": rank}) for rank in (0, 1)))
    _, seen = join(host, guest)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(host.close)
        while seen.store.add("left", 0) < 1:
            os.sched_yield()
        assert not closing.done()
        guest.close()
        closing.result()


def test_the_host_keeps_the_store_for_nodes_that_leave_at_the_same_time(make_client, eventually, monkeypatch, capfd):
    monkeypatch.setattr("mpwatch.multinode.rendezvous.client.OTHERS_LEAVE_SECONDS", 30.0)
    host, guest = connect(make_client(), make_client())
    join(host, guest)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(host.close)
        eventually(lambda: len(load_state(guest._opened_store.backend.get_state()[0]).last_heartbeats) == 1)
        guest.close()
        closing.result()
    assert capfd.readouterr().err == ""


def test_descriptors_that_are_no_sockets_any_more_are_left_alone(port):
    """Another thread may close a listed socket, and a file that is opened next then has its number."""
    pipe = {(fd, 0) for fd in os.pipe()}
    before = os.listdir("/proc/self/fd")
    assert store._find_connected(pipe, port) == []
    assert os.listdir("/proc/self/fd") == before
    for fd, _ in pipe:
        os.close(fd)


def test_the_end_of_the_server_is_detected(make_client, port, eventually):
    with lone_node(f"127.0.0.1:{port}", 60) as host:
        assert host.stdout.readline().split()[:2] == ["connected", "True"]
        (guest,) = connect(make_client((1, 2)))
        (formed,) = join(guest, last_call=30)
        host.kill()
        ended = time.monotonic()
        with pytest.raises(StoreLostError, match=f"the store at 127.0.0.1:{port} cannot be reached any more"):
            eventually(lambda: guest.count_waiting_nodes() < 0)
        assert time.monotonic() - ended < 2
        with pytest.raises(StoreLostError):
            formed.store.add("count", 1)
        with pytest.raises(StoreLostError):
            guest.join(deadline_in(10))


def test_a_store_that_ends_just_after_the_connect_leaves_no_socket(make_client, port, monkeypatch):
    make_backend = open_store.C10dRendezvousBackend
    with lone_node(f"127.0.0.1:{port}", 60) as host:
        assert host.stdout.readline().split()[:2] == ["connected", "True"]

        def kill_host_first(*args):
            host.kill()
            host.wait()
            return make_backend(*args)

        monkeypatch.setattr(open_store, "C10dRendezvousBackend", kill_host_first)
        with pytest.raises(StoreLostError, match="cannot be reached any more"):  # its traceback keeps the frames alive
            make_client((1, 2)).connect(deadline_in(20))
        assert store._find_connected(store._list_sockets(), port) == []


def test_a_store_that_ended_before_the_connect_is_lost_soon(port, monkeypatch):
    monkeypatch.setattr(store, "CONNECT_SECONDS", 0.5)
    started = time.monotonic()
    limit = Deadline(deadline_in(60), threading.Event())
    with pytest.raises(StoreLostError, match=f"this node cannot connect to the store at 127.0.0.1:{port}: "):
        store.open_tcp_store(Endpoint("127.0.0.1", port), "127.0.0.1", limit, 60)
    assert time.monotonic() - started < 20


def test_a_stuck_connect_does_not_delay_connects_to_other_ports(port):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store._connect_locks[port] = stuck = threading.Lock()
    with stuck:
        limit = Deadline(deadline_in(60), threading.Event())
        store.open_tcp_store(Endpoint("127.0.0.1", server.port), "127.0.0.1", limit, 60).close()


@contextmanager
def lone_node(endpoint, node_timeout, *prefix):
    command = [*prefix, sys.executable, LONE_NODE, endpoint, str(node_timeout)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


if os.geteuid() == 0:  # other users may not create networks

    @pytest.fixture
    def network():
        """The name of a network namespace, this end of the cable to it, and the address of this end."""
        name, cable, peer = (f"mpw{os.getpid()}{end}" for end in "nab")
        subnet = f"10.213.{os.getpid() % 250}"
        for command in (
            f"netns add {name}",
            f"link add {cable} type veth peer name {peer} netns {name}",
            f"addr add {subnet}.1/24 dev {cable}",
            f"link set {cable} up",
            f"-n {name} addr add {subnet}.2/24 dev {peer}",
            f"-n {name} link set {peer} up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        yield name, cable, f"{subnet}.1"
        subprocess.run(["ip", "netns", "del", name], check=True)  # and the cable with it

    def test_a_silent_network_is_detected_and_close_still_returns(network, make_client, port):
        namespace, cable, address = network
        (host,) = connect(make_client((1, 2), endpoint=f"{address}:{port}", node_timeout=4))
        guests = lone_node(f"{address}:{port}", 4, "ip", "netns", "exec", namespace)
        with in_background(lambda: host.join(deadline_in(60), last_call=60)) as joining, guests as guest:
            assert guest.stdout.readline().split()[:2] == ["connected", "False"]
            assert joining.result().group_world_size == 2
            assert guest.stdout.readline().split()[0] == "joined"
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)
            cut = time.monotonic()
            event, seconds, reason = guest.stdout.readline().split(maxsplit=2)
            assert event == "lost"
            assert float(seconds) < 4
            assert "cannot be reached any more" in reason
            event, seconds = guest.stdout.readline().split()
            assert event == "closed"
            assert float(seconds) < 2
            assert host.join(deadline_in(60), last_call=SHORT_LAST_CALL).group_world_size == 1
            assert time.monotonic() - cut < 4 + 6
        subprocess.run(
            ["ip", "link", "del", cable], check=True
        )  # this end had the address, so this machine cannot reach itself
        started = time.monotonic()
        host.close()
        assert time.monotonic() - started < 2
