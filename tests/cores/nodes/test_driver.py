"""The links between the driver of a job on a cluster and its nodes, and the result of all nodes."""

import os
import pickle
import socket
import threading
from contextlib import closing

import pytest

import mpwatch
from mpwatch.cluster import job_server
from mpwatch.cluster.node import _DriverLink
from mpwatch.cluster.results import merge_results
from mpwatch.nodes.frames import Framing
from mpwatch.nodes.messages import LinkHello, encode_message


@pytest.fixture
def server():
    rendezvous = mpwatch.Rendezvous("127.0.0.1:1", "job", 1, secret="secret")
    spec = mpwatch.WorkerSpec(fn=print, nprocs=1, rendezvous=rendezvous)
    with closing(job_server.JobServer("127.0.0.1", spec)) as server:
        yield server


class Node(Framing):
    """A node that has connected to the driver."""

    def __init__(self, server, number):
        super().__init__(b"secret", is_server=False)
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        self.close = self.socket.close
        self.socket.sendall(self.greeting)
        while not self.is_greeted:
            list(self.feed(self.socket.recv(1 << 16)))
        self.socket.sendall(self.encode(encode_message(LinkHello(number, "host"))))

    def send(self, *message):
        self.socket.sendall(self.encode(pickle.dumps(message)))


def test_lost_nodes_and_programs_without_the_key_leave_no_descriptor(server, eventually):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        with closing(Node(server, number)) as node:
            kind, of_node, (hostname, link) = server.messages.get()
            assert (kind, of_node, hostname) == ("hello", number, "host")
            node.send("end", None)
            assert server.messages.get() == ("sent", number, pickle.dumps(("end", None)))
            if number:  # somebody else, who cannot sign
                node.socket.sendall(node.encode(pickle.dumps(("output", "forged")))[:-1] + b"?")
            else:
                link.close()
                while node.socket.recv(1 << 16):
                    pass
            assert server.messages.get() == ("closed", number, link)
    eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_nodes_wait_while_the_driver_is_behind(server, monkeypatch):
    """So the driver keeps a few outputs, and not all that nodes print while it writes to a slow terminal."""
    monkeypatch.setattr("mpwatch.nodes.server.MAX_WAITING", 10)
    count, text = 200, "x" * 100_000
    with closing(Node(server, 0)) as node:
        thread = threading.Thread(target=lambda: [node.send("output", (number, text)) for number in range(count)])
        thread.start()
        assert server.messages.get()[0] == "hello"
        for number in range(count):
            assert server.messages.get() == ("sent", 0, pickle.dumps(("output", (number, text))))
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
        port = listener.getsockname()[1]
        with closing(_DriverLink(0, mpwatch.Rendezvous(f"127.0.0.1:{port}", "job", 1, secret=b"key"))) as link:
            driver.join()
            link.wait_for_stop()


def test_a_job_names_the_rank_that_is_late_most():
    late = [mpwatch.Lateness(rank=rank, share=share) for rank, share in enumerate((0.2, 0.7, 0.3))]
    nodes = [mpwatch.RunResult(mpwatch.WorkerState.FAILED, slow_rank=each) for each in (*late, None)]
    assert merge_results(nodes).slow_rank.rank == 1
