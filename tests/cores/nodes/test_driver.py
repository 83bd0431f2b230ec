"""What the driver of a job on a cluster does by itself: attempts of lost nodes, results, links to nodes."""

import os
import pickle
import socket
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest

import mpwatch
from mpwatch.cluster import job_server
from mpwatch.cluster.attempts import JobAttempts
from mpwatch.cluster.node import _DriverLink
from mpwatch.cluster.results import merge_results
from mpwatch.events import RendezvousCompleted, Restarting
from mpwatch.nodes.frames import Framing
from mpwatch.nodes.messages import LinkHello, encode_message

BASE = {"monotonic": 0.0, "run_id": "job", "ranks": (0,)}
OF_ROUND = {"group_world_size": 2, "world_size": 2, "role_rank": 0, "role_world_size": 2, "master_port": 1}
LOSS = mpwatch.ProcessFailure(
    rank=1, local_rank=0, pid=None, hostname="host1", group_rank=1, kind=mpwatch.FailureKind.LOST, exit_code=1
)


def test_the_attempts_of_lost_nodes_are_kept():
    job = JobAttempts()

    def start(attempt):
        facts = {"time": 10.0 * attempt, "attempt": attempt, "job": "job", "master_addr": "host0"}
        for node in range(2):  # each node publishes all events
            job.handle_event(RendezvousCompleted(**BASE, **OF_ROUND, **facts, group_rank=node))

    def restart(attempt):
        known = {"time": 10.0 * attempt + 5, "attempt": attempt, "cause": None, "delay": 0, "restarts_left": 1}
        for _ in range(2):
            job.handle_event(Restarting(**BASE, **known))

    start(0)
    restart(0)
    start(1)
    assert job.end(100.0, LOSS, {1: LOSS}) == (0, 1)
    restart(1)
    last = mpwatch.Attempt(number=2, ranks=(0, 1), started_at=0.0, elapsed=1.0, state=mpwatch.WorkerState.SUCCEEDED)
    result = job.complete(mpwatch.RunResult(state=mpwatch.WorkerState.SUCCEEDED, attempts=(last,)))
    assert [attempt.name for attempt in result.attempts] == ["first start, 5.0 s", "restart 1, 90.0 s", "restart 2, 1.0 s"]
    assert result.attempts[1].root_cause is LOSS


def test_the_reason_is_that_of_a_node_that_the_driver_has_not_stopped():
    by_driver = "the run was stopped: terminate() was called, before its ranks were started"
    own = "the run was stopped: a stop was requested, before its ranks were started"
    for reasons, chosen in (([by_driver, own], own), ([own, by_driver], own), (["", by_driver], by_driver)):
        results = [mpwatch.RunResult(mpwatch.WorkerState.STOPPED, reason=reason) for reason in reasons]
        assert merge_results(results).reason == chosen


# --- Links


@pytest.fixture
def server():
    rendezvous = mpwatch.Rendezvous("127.0.0.1:1", "job", 1, secret="secret")
    spec = mpwatch.WorkerSpec(fn=print, nprocs=1, rendezvous=rendezvous)
    with closing(job_server.JobServer("127.0.0.1", spec, lambda *_: None)) as server:
        yield server


class Node(Framing):
    """A node that has connected to the driver."""

    def __init__(self, server, number):
        super().__init__(b"secret", is_server=False)
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        self.socket.sendall(self.greeting)
        while not self.is_greeted:
            list(self.feed(self.socket.recv(1 << 16)))
        self.socket.sendall(self.encode(encode_message(LinkHello(number, "host"))))

    def send(self, *message):
        self.socket.sendall(self.encode(pickle.dumps(message)))

    def close(self):
        self.socket.close()


def test_lost_nodes_and_programs_without_the_key_leave_no_descriptor(server, eventually):
    def count_descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = count_descriptors()
    for number in range(3):
        with closing(Node(server, number)) as node:
            kind, of_node, (hostname, link) = server.messages.get()
            assert (kind, of_node, hostname) == ("hello", number, "host")
            node.send("end", None)
            assert server.messages.get() == ("end", number, None)
            if number:  # somebody else, who cannot sign
                node.socket.sendall(node.encode(pickle.dumps(("output", "forged")))[:-1] + b"?")
            else:
                link.close()
                while node.socket.recv(1 << 16):
                    pass
            assert server.messages.get() == ("closed", number, link)
    eventually(lambda: count_descriptors() == before)


def test_nodes_wait_while_the_driver_is_behind(server, monkeypatch):
    """So the driver keeps a few outputs, and not all that nodes print while it writes to a slow terminal."""
    monkeypatch.setattr(job_server, "MAX_WAITING", 10)
    count, text = 200, "x" * 100_000
    with closing(Node(server, 0)) as node:
        thread = threading.Thread(target=lambda: [node.send("output", (number, text)) for number in range(count)])
        thread.start()
        assert server.messages.get()[0] == "hello"
        for number in range(count):
            assert server.messages.get() == ("output", 0, (number, text))
            assert server.messages.qsize() < count / 2
        thread.join()


def test_a_stop_that_comes_together_with_the_answer_is_not_lost():
    def serve():
        with listener.accept()[0] as connected:
            framing, frames = Framing(b"key", is_server=True), []
            connected.sendall(framing.greeting)
            while not frames:
                frames += framing.feed(connected.recv(4096))
            connected.sendall(framing.encode(frames[0]) + framing.encode(b"stop"))

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        driver = threading.Thread(target=serve)
        driver.start()
        with closing(_DriverLink(SimpleNamespace(number=0, key=b"key", driver=listener.getsockname()))) as link:
            driver.join()
            link.wait_for_stop()


def test_a_driver_that_has_ended_is_not_tried_again(monkeypatch):
    monkeypatch.setattr("mpwatch.cluster.node.CONNECT_TRIES", 10**6)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = listener.getsockname()
    with pytest.raises(ConnectionError, match="cannot connect to the driver at"):
        _DriverLink(SimpleNamespace(number=0, key=b"key", driver=address))
