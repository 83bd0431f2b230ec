"""The driver's end of the connections to nodes."""

import os
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from mpwatch.cluster.links import NodeLinks

KEY = b"secret of the job"


@pytest.fixture
def links():
    made = NodeLinks("127.0.0.1", KEY, lambda *_: None)
    yield made
    made.close()


def count_descriptors():
    return len(os.listdir("/proc/self/fd"))


def lose_a_node(links, number):
    with Client(links.address, authkey=KEY) as node:
        node.send(("hello", (number, "host")))
        kind, _, (_, connection) = links.messages.get()
        assert kind == "hello"
    assert links.messages.get() == ("closed", number, connection)
    links.release(connection)


def test_lost_nodes_leave_no_descriptor(links):
    before = count_descriptors()
    for number in range(3):
        lose_a_node(links, number)
    assert count_descriptors() == before


def test_a_program_without_the_key_leaves_no_descriptor(links):
    before = count_descriptors()
    with pytest.raises(AuthenticationError):
        Client(links.address, authkey=b"another secret")
    lose_a_node(links, 0)  # so the thread of the other program is in the list
    for thread in links._threads[1:]:
        thread.join()
    assert count_descriptors() == before
