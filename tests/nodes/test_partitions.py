"""Nodes that are cut off from the coordinator: nothing passes between them any more, and neither sees an end."""

import socket
from contextlib import suppress
from functools import partial

import pytest

import mpwatch
from nodes import tasks
from nodes.harness import LONG, NODE_TIMEOUT


class Cable:
    """A port that leads to the coordinator until it is cut."""

    def __init__(self, job):
        self._job, self._sockets = job, []
        self.port = self._register(socket.create_server(("127.0.0.1", 0)), self._accept).getsockname()[1]

    def _register(self, end, do):
        self._job.register(end, do)
        self._sockets.append(end)
        return end

    def _accept(self, server):
        ours, theirs = server.accept()[0], socket.create_connection(("127.0.0.1", self._job.port))
        self._register(ours, partial(self._pass_on, theirs))
        self._register(theirs, partial(self._pass_on, ours))

    def _pass_on(self, target, source):
        with suppress(ConnectionError):
            if data := source.recv(1 << 16):
                return target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        self._job.unregister(source)
        return self._sockets.remove(source)

    def cut(self):
        for end in self._sockets:
            self._job.unregister(end)

    def close(self):
        for end in self._sockets:
            end.close()


@pytest.fixture
def cable(job):
    job.rendezvous["node_timeout"] = NODE_TIMEOUT
    cable = Cable(job)
    yield cable
    cable.close()


def test_a_node_that_is_cut_off_stops_before_the_others_go_on_without_it(job, cable):
    """Its rank ignores SIGTERM."""
    job.rendezvous["nnodes"] = 2, 3
    start = partial(job.start, tasks.ignore_sigterm, args=(2,), grace_period=LONG)
    host, other = (start(rendezvous={"rank": rank}) for rank in (0, 1))
    job.await_coordinator()
    far = start(rendezvous={"rank": 2, "endpoint": f"127.0.0.1:{cable.port}", "is_host": False})
    first = job.await_world(3)
    cable.cut()
    job.await_end(first.of(far))
    second = job.await_world(2)
    assert first.ended_at < min(process.started_at for process in second)
    assert_coordinator_lost(far, cable)
    back = start(rendezvous={"rank": 2})
    third = job.await_world(3)
    assert {process.node for process in third} == {host.name, other.name, back.name}
    third.order("return")
    job.results([host, other, back])


def test_no_node_goes_on_without_its_coordinator(job, cable):
    """Nodes that can still reach one another do not go on either. The node of the coordinator goes on alone."""
    job.rendezvous["nnodes"] = 1, 3
    host = job.start(rendezvous={"last_call_timeout": 10.0})
    job.await_coordinator()
    others = job.start_several(2, rendezvous={"endpoint": f"127.0.0.1:{cable.port}", "is_host": False})
    world = job.await_world(3)
    cable.cut()
    for node in others:
        job.await_end(world.of(node))
        assert_coordinator_lost(node, cable)
    job.await_world(1).order("return")
    job.results([host])


def assert_coordinator_lost(node, cable):
    outcome = node.outcome()
    assert type(outcome.error) is mpwatch.RunFailedError
    assert f"127.0.0.1:{cable.port}" in str(outcome.error)
