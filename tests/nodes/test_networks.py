"""Hosts of their own, where the machine allows them: what a cut cable does."""

import socket
from contextlib import ExitStack
from functools import partial

import pytest

from nodes.networks import Network


@pytest.fixture
def connection():
    """A network of two hosts, and both ends of a connection between them."""
    with ExitStack() as stack:
        network = stack.enter_context(Network(2))
        address = network.address(0), 29400
        server = stack.enter_context(network.within(0, partial(socket.create_server, address)))
        there = stack.enter_context(network.within(1, partial(socket.create_connection, address, timeout=10.0)))
        here = stack.enter_context(server.accept()[0])
        here.settimeout(10.0)
        yield network, here, there


def test_hosts_reach_one_another(connection):
    network, here, there = connection
    there.send(b"x")
    assert here.recv(1) == b"x"
    assert there.getsockname()[0] == network.address(1)


def test_a_cut_cable_takes_all_and_tells_nobody(connection):
    network, here, there = connection
    network.cut(1)
    there.send(b"x")
    here.settimeout(0.3)
    with pytest.raises(TimeoutError):
        here.recv(1)
    assert there.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


def test_a_mended_cable_loses_nothing_of_a_connection(connection):
    network, here, there = connection
    network.cut(1)
    there.send(b"x")
    network.mend(1)
    assert here.recv(1) == b"x"


def test_a_cut_of_one_is_none_of_others():
    with Network(3) as network, ExitStack() as stack:
        address = network.address(0), 29400
        server = stack.enter_context(network.within(0, partial(socket.create_server, address)))
        network.cut(2)
        stack.enter_context(network.within(1, partial(socket.create_connection, address, timeout=10.0)))
        stack.enter_context(server.accept()[0])
