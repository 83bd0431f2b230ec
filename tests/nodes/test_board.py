"""The board of a round, over a store of torch's, while somebody else writes into that, too."""

import time

import pytest
from torch.distributed import HashStore

from mpwatch.multinode.protocol.messages import AttemptFailing, JobClosed, ShutdownAck, StopAttempt
from mpwatch.multinode.protocol.signed_json import SignedJson
from mpwatch.multinode.protocol.store_channel import StoreChannel
from mpwatch.multinode.rendezvous.endpoint import Endpoint
from mpwatch.multinode.rendezvous.store import PrefixedStore, StoreConnection

PATIENCE = 0.05  # seconds
FORGED = ["", "garbage", '\n{"kind":"Closed"}', "\n{}", "\n" + "[" * 100, "\n" + "x" * (2 << 20)]


def boards_with(key):
    """The chair's, and that of another node."""
    store = PrefixedStore(StoreConnection(HashStore(), [], Endpoint("host", 1)), "round")
    boards = [StoreChannel(store, SignedJson(key, "job"), group_rank=rank, patience=PATIENCE) for rank in (0, 1)]
    assert all(board.is_open() for board in boards)
    return boards


@pytest.fixture(params=[b"", b"secret"], ids=["unsigned", "signed"])
def boards(request):
    return boards_with(request.param)


@pytest.mark.parametrize("forged", FORGED[:2] + FORGED[3:])
def test_what_stands_where_the_chair_has_yet_to_speak_is_written_over(boards, forged, caplog):
    chair, node = boards
    node._store.set("word/1", forged)
    assert node.words() == node.words() == []
    assert [record.args[0] for record in caplog.records] == ["word/1"]
    chair.say(StopAttempt(0, "why"))
    assert node.words() == [StopAttempt(0, "why")]


@pytest.mark.parametrize("forged", FORGED)
def test_what_stands_where_a_node_has_yet_to_write_is_written_over(boards, forged, caplog):
    chair, node = boards
    node._store.add("inbox", 1)
    node._store.set("inbox/1", forged)
    assert chair.inbox() == chair.inbox() == []
    assert [record.args[0] for record in caplog.records] == ["inbox/1"]
    node._write("inbox/1", node._place("inbox", 1), {"kind": "ShutdownAck", "group_rank": 1})
    assert chair.inbox() == [ShutdownAck(1)]


def test_messages_that_were_announced_and_never_written_are_not_waited_for_and_not_remembered(boards):
    chair, node = boards
    node._store.add("inbox", 1000)
    node.post(ShutdownAck(1))
    assert chair.inbox() == [ShutdownAck(1)]
    deadline = time.monotonic() + 5.0
    while chair._holes and time.monotonic() < deadline:
        assert chair.inbox() == []
    assert not chair._holes


def test_what_was_said_elsewhere_does_not_count_here():
    chair, node = boards_with(b"secret")
    chair.say(StopAttempt(0, "why"))
    chair.say(JobClosed())
    node.post(AttemptFailing(1, 0))
    node._store.set("word/3", node._store.get("word/1"))
    node._store.add("inbox", 1)
    node._store.set("inbox/2", node._store.get("inbox/1"))
    assert node.words() == [StopAttempt(0, "why"), JobClosed()]
    assert chair.inbox() == [AttemptFailing(1, 0)]
