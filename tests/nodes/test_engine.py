"""Torch's rendezvous for one node: engines that meet on loopback, and all that keeps them from it."""

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

sys.path.insert(0, str(Path(__file__).parent.parent))

from programs import ENV

from mpwatch import LaunchError
from mpwatch.multinode.rendezvous import store
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.errors import CancelledError, JobClosedError, StoreLostError
from mpwatch.multinode.rendezvous.torch_state import State, read
from mpwatch.options.rendezvous import Rendezvous

NODE = Path(__file__).parent / "lonely.py"
SOON = 0.2  # seconds of a last call


@pytest.fixture(scope="module", autouse=True)
def _what_torch_keeps():
    """The first store of a process leaves three descriptors, of its event loops, for the later ones."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gc.collect()


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def node(port):
    """Makes engines of one job; in the end they are closed, the one that serves the store last."""
    engines = []

    def make(nnodes=2, **options):
        terms = {"endpoint": f"127.0.0.1:{port}", "run_id": "job", "node_timeout": 60, **options}
        engines.append(RendezvousClient(Rendezvous(terms.pop("endpoint"), terms.pop("run_id"), nnodes, **terms)))
        return engines[-1]

    yield make
    for engine in sorted(engines, key=lambda engine: engine.is_host):
        engine.close()
    gc.collect()


def until(seconds):
    return time.monotonic() + seconds


def together(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def join(*engines, last_call=SOON):
    return together(*(lambda engine=engine: engine.join(until(30), last_call=last_call) for engine in engines))


def connected(*engines):
    for engine in engines:
        engine.connect(until(10))
    return engines


def state_of(engine):
    response = engine._opened.backend.get_state()
    return State() if response is None else read(response[0])


@contextmanager
def in_background(call):
    """What it raises is raised in the end."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        yield future
        future.result()


def test_two_nodes_meet_and_talk_in_the_store_of_their_round(node):
    host, guest = connected(node(), node())
    assert (host.is_host, guest.is_host) == (True, False)
    assert host.address == guest.address == "127.0.0.1"
    first, second = join(host, guest)
    assert {first.group_rank, second.group_rank} == {0, 1}
    assert first.group_world_size == second.group_world_size == 2
    first.store.set("word", b"\0said")
    assert second.store.check(["word"])
    assert not second.store.check(["word", "more"])
    assert second.store.get("word") == b"\0said"
    assert [first.store.add("count", 2), second.store.add("count", 3)] == [2, 5]
    assert dist.PrefixStore("apart", first.store).add("count", 1) == 1
    assert (first.store.delete_key("word"), second.store.check(["word"])) == (True, False)


def test_the_store_of_a_round_takes_so_much_at_once(node):
    (host,) = connected(node(1))
    (formed,) = join(host)
    with pytest.raises(ValueError, match="the store takes 8388608 bytes at once, not 8388609"):
        formed.store.set("word", b"x" * (store.MAX_VALUE + 1))
    formed.store.set("word", b"x" * store.MAX_VALUE)
    assert len(formed.store.get("word")) == store.MAX_VALUE


def listeners():
    """The sockets on which this process listens, by inode."""
    ours = {os.fstat(int(fd)).st_ino for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return ours & {int(words[9]) for words in lines if words[3] == "0A"}


def test_no_other_store_is_opened(node):
    host, guest = connected(node(), node())
    join(host, guest)
    assert len(listeners()) == 1


def test_a_newcomer_is_seen_and_taken_into_the_next_round(node, eventually):
    host, guest, newcomer = connected(node((2, 3)), node((2, 3)), node((2, 3)))
    old = join(host, guest)
    assert guest.waiting() == 0
    with in_background(lambda: newcomer.join(until(30), last_call=SOON)) as joining:
        eventually(lambda: host.waiting() == guest.waiting() == 1)
        rounds = [*join(host, guest), joining.result()]
    assert {formed.group_rank for formed in rounds} == {0, 1, 2}
    assert {formed.group_world_size for formed in rounds} == {3}
    old[0].store.set("word", "of the old round")
    assert not rounds[0].store.check(["word"])


def test_a_node_that_has_left_is_not_waited_for(node):
    host, guest = connected(node((1, 2)), node((1, 2)))
    join(host, guest, last_call=20)
    guest.close()
    assert host.join(until(10), last_call=SOON).group_world_size == 1


def test_of_the_thread_that_gives_signs_of_life_the_kernel_keeps_nothing(node):
    """It would for a moment, once in ten times."""
    (engine,) = connected(node(1))
    handler = engine._meeting._handler
    for _ in range(100):
        handler._start_heartbeats()
        number = handler._keep_alive_timer._thread.native_id
        handler.stop()
        assert not os.path.exists(f"/proc/self/task/{number}")


def test_a_node_that_gives_no_sign_of_life_is_dropped(node):
    host, guest = connected(node((1, 2), node_timeout=2), node((1, 2), node_timeout=2))
    join(host, guest, last_call=20)
    guest._meeting._handler.stop()
    started = time.monotonic()
    assert host.join(until(20), last_call=SOON).group_world_size == 1
    assert time.monotonic() - started < 2 + 4  # torch looks once a second, and once more before it begins


def test_a_join_can_be_cancelled_and_leaves_no_trace(node, eventually):
    (host,) = connected(node())
    with pytest.raises(CancelledError), in_background(lambda: host.join(until(60))):
        eventually(lambda: state_of(host).participants)
        cancelled = time.monotonic()
        host.cancel()
    assert time.monotonic() - cancelled < 1.5
    state = state_of(host)
    assert not state.participants
    assert not state.last_heartbeats
    with pytest.raises(CancelledError):
        host.join(until(60))


def test_a_connect_can_be_cancelled(node, eventually):
    engine = node(is_host=False)
    threads = threading.active_count()
    with pytest.raises(CancelledError), in_background(lambda: engine.connect(until(60))):
        eventually(lambda: threading.active_count() > threads)
        cancelled = time.monotonic()
        engine.cancel()
    assert time.monotonic() - cancelled < 1.5


def test_too_few_nodes(node):
    (host,) = connected(node((3, 4)))
    with pytest.raises(
        LaunchError, match=r"job 'job' at 127\.0\.0\.1:\d+: 1 of 3 nodes had come after 1\.\d s\. Has mpwatch"
    ):
        host.join(until(1))
    assert not state_of(host).participants


def test_a_job_that_is_full_says_so(node):
    host, guest, spare = connected(node(), node(), node())
    join(host, guest)
    with pytest.raises(LaunchError, match="the job has all 2 nodes that it may have"):
        spare.join(until(1))
    assert not state_of(host).redundancy_list


def test_a_job_that_takes_nobody_in_says_so(node):
    host, newcomer = connected(node((1, 2)), node((1, 2)))
    join(host)
    with pytest.raises(LaunchError, match="the job runs with 1 nodes, and has not taken this one in"):
        newcomer.join(until(1))
    assert not state_of(host).wait_list


def test_nobody_joins_a_job_that_is_over(node):
    host, guest = connected(node((1, 2)), node((1, 2)))
    join(host)
    host.set_closed()
    with pytest.raises(JobClosedError, match="closed: that job is over"):
        guest.join(until(10))


def test_the_number_of_a_round_that_somebody_has_left_meanwhile(node):
    """Torch would give rank 1 of 1."""
    host, guest = connected(node((1, 2)), node((1, 2)))
    join(host, guest, last_call=20)
    meeting = guest._meeting
    meeting._look(state_of(host))
    state = state_of(host)
    (first,) = (member for member, rank in state.participants.items() if rank == 0)
    del state.participants[first]
    meeting._look(state)
    assert not meeting._is_whole(dataclasses.make_dataclass("Info", ["world_size"])(1))


def test_a_name_that_nobody_knows(node):
    with pytest.raises(LaunchError, match=r"the name 'nowhere\.invalid' cannot be resolved .* give the address instead"):
        node(endpoint="nowhere.invalid:29400").connect(until(1))


def test_a_port_where_nobody_listens(node, port):
    started = time.monotonic()
    with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port}: nobody listens there: .* is_host=True"):
        node(is_host=False).connect(until(1))
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("is_host", [True, None])
def test_a_port_that_something_silent_has_taken(node, port, is_host):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(LaunchError, match=f"port {port} is taken"):
        node(is_host=is_host).connect(until(30))


def test_a_listener_that_says_nothing(node, port):
    started = time.monotonic()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(LaunchError, match="does not answer as a store of torch's: is the port taken"),
    ):
        node(is_host=False).connect(until(1))
    assert time.monotonic() - started < 3


def test_a_listener_that_is_something_else(node, port):
    def answer():
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(1 << 10)

    taken = pytest.raises(LaunchError, match=f"port {port} is taken by something that does not answer")
    with socket.create_server(("127.0.0.1", port)) as server, in_background(answer), taken:
        node(is_host=False).connect(until(60))


def test_the_host_may_come_last(node):
    guest = node(is_host=False)
    with in_background(lambda: guest.connect(until(30))):
        node(is_host=True).connect(until(30))


def test_a_name_of_this_machine_is_served_at_all_its_addresses(node, port):
    host, guest = connected(node(endpoint=f"localhost:{port}"), node(endpoint=f"127.0.0.1:{port}"))
    assert (host.is_host, host.address, guest.is_host) == (True, "localhost", False)
    assert {formed.group_world_size for formed in join(host, guest)} == {2}


def test_whose_address_is_given_has_that(node):
    (host,) = connected(node(local_addr="node7.cluster"))
    assert host.address == "node7.cluster"


def test_static_nodes_have_the_numbers_they_say(node):
    nodes = [node(2, backend="static", options={"rank": rank}) for rank in (1, 0)]
    together(*(lambda engine=engine: engine.connect(until(20)) for engine in nodes))
    assert [engine.is_host for engine in nodes] == [False, True]
    for _ in range(2):
        rounds = join(*nodes)
        assert [(formed.group_rank, formed.group_world_size) for formed in rounds] == [(1, 2), (0, 2)]
        assert rounds[0].store.add("new in each round", 1) == 1
    assert nodes[0].waiting() == 0
    nodes[1].set_closed()
    with pytest.raises(JobClosedError):
        nodes[0].join(until(20))


def test_a_static_node_that_does_not_come(node):
    (host,) = connected(node(3, backend="static", options={"rank": 0}))
    for _ in range(2):  # it has left no mark
        with pytest.raises(LaunchError, match=r"nodes with these ranks had not come: 1, 2\."):
            host.join(until(0.5))


def test_a_static_node_that_comes_twice(node):
    host, guest, twin = connected(*(node(2, backend="static", options={"rank": rank}) for rank in (0, 1, 1)))
    join(host, guest)
    with pytest.raises(LaunchError, match=r"options=\{'rank': 1\} has come already"):
        twin.join(until(20))


def test_what_is_closed_keeps_nothing_alive(node, port):
    host, guest = connected(node(), node())
    ours, _ = join(host, guest)
    guest.close()
    host.close()
    host.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("mpwatch", "Rendezvous"))]
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
    with pytest.raises(StoreLostError, match="this node has closed it"):
        ours.store.check(["word"])


def test_who_leaves_at_the_same_time_as_the_host_has_a_store_to_say_so(node, eventually, monkeypatch, capfd):
    monkeypatch.setattr("mpwatch.multinode.rendezvous.client.SEE_OFF_SECONDS", 30.0)
    host, guest = connected(node(), node())
    join(host, guest)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(host.close)
        eventually(lambda: len(read(guest._opened.backend.get_state()[0]).last_heartbeats) == 1)
        guest.close()
        closing.result()
    assert capfd.readouterr().err == ""


def test_descriptors_that_are_no_sockets_any_more_are_left_alone(port):
    """Other threads close what has just been listed, and the next thing that is opened has its number."""
    pipe = {(fd, 0) for fd in os.pipe()}
    before = os.listdir("/proc/self/fd")
    assert store._connected(pipe, port) == []
    assert not store._listens(pipe, port)
    assert os.listdir("/proc/self/fd") == before
    for fd, _ in pipe:
        os.close(fd)


def test_the_end_of_the_server_is_noticed(node, port, eventually):
    with lonely(f"127.0.0.1:{port}", 60) as host:
        assert host.stdout.readline().split()[:2] == ["connected", "True"]
        (guest,) = connected(node((1, 2)))
        (formed,) = join(guest, last_call=30)
        host.kill()
        ended = time.monotonic()
        with pytest.raises(StoreLostError, match=f"the store at 127.0.0.1:{port} cannot be reached any more"):
            eventually(lambda: guest.waiting() < 0)
        assert time.monotonic() - ended < 2
        with pytest.raises(StoreLostError):
            formed.store.add("count", 1)
        with pytest.raises(StoreLostError):
            guest.join(until(10))


@contextmanager
def lonely(endpoint, node_timeout, *within):
    command = [*within, sys.executable, NODE, endpoint, str(node_timeout)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


if os.geteuid() == 0:  # whoever else may make no networks

    @pytest.fixture
    def network():
        """The name of a network namespace; our end of the cable to it; and our address there."""
        name, ours, theirs = (f"mpw{os.getpid()}{end}" for end in "nab")
        mine = f"10.213.{os.getpid() % 250}"
        for command in (
            f"netns add {name}",
            f"link add {ours} type veth peer name {theirs} netns {name}",
            f"addr add {mine}.1/24 dev {ours}",
            f"link set {ours} up",
            f"-n {name} addr add {mine}.2/24 dev {theirs}",
            f"-n {name} link set {theirs} up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        yield name, ours, f"{mine}.1"
        subprocess.run(["ip", "netns", "del", name], check=True)  # and the cable with it

    def test_a_network_that_goes_silent(network, node, port):
        namespace, cable, address = network
        (host,) = connected(node((1, 2), endpoint=f"{address}:{port}", node_timeout=4))
        guests = lonely(f"{address}:{port}", 4, "ip", "netns", "exec", namespace)
        with in_background(lambda: host.join(until(60), last_call=60)) as joining, guests as guest:
            assert guest.stdout.readline().split()[:2] == ["connected", "False"]
            assert joining.result().group_world_size == 2
            assert guest.stdout.readline().split()[0] == "joined"
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)
            cut = time.monotonic()
            word, seconds, why = guest.stdout.readline().split(maxsplit=2)
            assert word == "lost"
            assert float(seconds) < 4
            assert "cannot be reached any more" in why
            word, seconds = guest.stdout.readline().split()
            assert word == "closed"
            assert float(seconds) < 2
            assert host.join(until(60), last_call=SOON).group_world_size == 1
            assert time.monotonic() - cut < 4 + 6
        subprocess.run(["ip", "link", "del", cable], check=True)  # and with it our address: we do not even reach ourselves
        started = time.monotonic()
        host.close()
        assert time.monotonic() - started < 2
