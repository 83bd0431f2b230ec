"""Nodes lose no time when they join a round: they poll often at first, and do not wait for nodes that will not come."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from mpwatch.errors import LaunchError
from mpwatch.multinode.node_machine import NodeMachine, Rejoin, ReportAttempt
from mpwatch.multinode.protocol.json_codec import to_json
from mpwatch.multinode.protocol.messages import (
    AttemptDecision,
    ExpectedNodes,
    JobConfig,
    LostNode,
    NextStep,
    NodeInfo,
    RestartHistory,
)
from mpwatch.multinode.protocol.signed_json import SignedJson
from mpwatch.multinode.rendezvous.client import RendezvousClient
from mpwatch.multinode.rendezvous.rounds import EXPECTED_NODES_KEY
from mpwatch.multinode.rendezvous.torch_handler import MAX_POLL_SECONDS, MIN_POLL_SECONDS, poll_interval
from mpwatch.multinode.rendezvous.torch_state import load_state
from mpwatch.options.rendezvous import Rendezvous

SOON = 0.2  # seconds
LONG = 20.0  # seconds of a last call that no node should wait for
TIMEOUT = 30.0  # seconds
SECRET = "of the job"


@pytest.fixture(scope="module", autouse=True)
def _torch_descriptors():
    """Torch's first store of a process leaves descriptors of its event loops open, for later stores."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def clients():
    """Three clients of a job whose minimum is one node. The one that serves the store is closed last."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    made = [
        RendezvousClient(Rendezvous(f"127.0.0.1:{port}", "job", (1, 4), is_host=not number, secret=SECRET))
        for number in range(3)
    ]
    for client in made:
        client.connect(time.monotonic() + TIMEOUT)
    yield made
    for client in reversed(made):
        client.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(3) as pool:
        yield pool


def join(pool, clients, **options):
    calls = [pool.submit(client.join, time.monotonic() + TIMEOUT, **options) for client in clients]
    return lambda: [call.result().group_world_size for call in calls]


def await_state(client, condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition(load_state(client._opened_store.backend.get_state()[0])):
        assert time.monotonic() < deadline
        time.sleep(SOON / 10)


def test_survivors_that_have_all_joined_wait_for_no_other_node(clients, pool):
    survivors = clients[:2]
    began = time.monotonic()
    assert join(pool, survivors, last_call=LONG, expected_nodes=2)() == [2, 2]
    assert join(pool, survivors, last_call=LONG, expected_nodes=2)() == [2, 2]
    assert time.monotonic() - began < LONG / 2


def write_expected_nodes(client, secret):
    entry = SignedJson(secret.encode(), "job").encode(EXPECTED_NODES_KEY, to_json(ExpectedNodes(2)))
    client.get_job_store().set(EXPECTED_NODES_KEY, entry)


def test_new_nodes_do_not_wait_for_nodes_that_cannot_come(clients, pool):
    write_expected_nodes(clients[0], SECRET)
    began = time.monotonic()
    assert join(pool, clients[:2], last_call=LONG)() == [2, 2]
    assert time.monotonic() - began < LONG / 2


@pytest.mark.parametrize(("secret", "text"), [("", "not signed"), ("of another job", "signed with another secret")])
def test_a_number_of_expected_nodes_without_the_secret_is_refused(clients, secret, text):
    write_expected_nodes(clients[0], secret)
    with pytest.raises(LaunchError, match=f"the number of nodes that can come at present cannot be read: {text}"):
        clients[0].join(time.monotonic() + TIMEOUT, last_call=LONG)
    await_state(clients[0], lambda state: not state.participants)


def test_survivors_wait_for_a_newcomer_that_waits_already(clients, pool):
    *survivors, newcomer = clients
    assert join(pool, survivors, last_call=LONG, expected_nodes=2)() == [2, 2]
    joined = join(pool, [newcomer], last_call=LONG)
    await_state(newcomer, lambda state: state.wait_list)
    began = time.monotonic()
    assert join(pool, survivors, last_call=LONG, expected_nodes=2)() == [3, 3]
    assert joined() == [3]
    assert time.monotonic() - began < LONG / 2


def test_a_newcomer_does_not_count_as_a_survivor(clients, pool):
    first, second, newcomer = clients
    assert join(pool, [first, second], last_call=LONG, expected_nodes=2)() == [2, 2]
    joined = join(pool, [newcomer], last_call=LONG)
    await_state(newcomer, lambda state: state.wait_list)
    second._implementation._remove_this_node()  # as at the start of its join
    returned = join(pool, [first], last_call=LONG, expected_nodes=2)
    await_state(newcomer, lambda state: len(state.participants) == 2)
    assert join(pool, [second], last_call=LONG, expected_nodes=2)() == returned() == joined() == [3]


def test_a_missing_survivor_is_waited_for_in_the_last_call(clients, pool):
    assert join(pool, clients[:1], last_call=SOON)() == [1]
    assert join(pool, clients[:1], last_call=SOON, expected_nodes=2)() == [1]


def test_a_node_polls_several_times_a_second_at_first(clients, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: pauses.append(seconds) or sleep(seconds))
    with pytest.raises(LaunchError):
        clients[0].join(time.monotonic() + 1.0, last_call=LONG)
    assert pauses
    assert max(pauses) < 0.5  # torch would pause for a second


def test_the_poll_interval_grows_with_the_time_waited_and_with_the_nodes():
    assert [poll_interval(waited, 2) for waited in (0, 2, 5, 10, 600)] == [
        MIN_POLL_SECONDS,
        0.2,
        0.5,
        MAX_POLL_SECONDS,
        MAX_POLL_SECONDS,
    ]
    assert [poll_interval(0, nodes) for nodes in (10, 50, 100, 1000)] == [0.1, 0.5, MAX_POLL_SECONDS, MAX_POLL_SECONDS]


def test_a_node_knows_how_many_nodes_of_its_round_will_join_the_next():
    node_info = NodeInfo(1, "host", "host", 2, "default", False, 10.0, JobConfig(()), RestartHistory())
    node_machine = NodeMachine(node_info, size=4, min_nodes=1, max_restarts=0, node_timeout=2, now=0)
    decision = AttemptDecision(
        0, NextStep.RE_RENDEZVOUS, RestartHistory(1), lost_nodes=(LostNode(3, "lost", 6, 2, "silent"),)
    )
    assert node_machine.handle_broadcast(decision) == [ReportAttempt(decision), Rejoin(RestartHistory(1), expected_nodes=3)]
