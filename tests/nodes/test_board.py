"""The channel of a round, over a store of torch, while another program writes into the same store."""

import logging
import time

import pytest
from torch.distributed import HashStore

from mpwatch.multinode.protocol.messages import AttemptFailing, JobFinished, ShutdownAck, StopAttempt
from mpwatch.multinode.protocol.signed_json import SignedJson
from mpwatch.multinode.protocol.store_channel import StoreChannel
from mpwatch.multinode.rendezvous.endpoint import Endpoint
from mpwatch.multinode.rendezvous.store import PrefixedStore, StoreConnection

WRITE_TIMEOUT = 0.05  # seconds
INVALID = ["", "garbage", '\n{"kind":"JobFinished"}', "\n{}", "\n" + "[" * 100, "\n" + "x" * (2 << 20)]


def open_channels(secret):
    """The channels of the leader and of another node."""
    store = PrefixedStore(StoreConnection(HashStore(), [], Endpoint("host", 1)), "round")
    channels = [
        StoreChannel(
            store,
            SignedJson(secret, "job"),
            group_rank=rank,
            write_timeout=WRITE_TIMEOUT,
            log_warning=logging.getLogger("mpwatch").warning,
        )
        for rank in (0, 1)
    ]
    assert all(channel.try_open() for channel in channels)
    return channels


@pytest.fixture(params=[b"", b"secret"], ids=["unsigned", "signed"])
def channels(request):
    return open_channels(request.param)


@pytest.mark.parametrize("invalid", INVALID[:2] + INVALID[3:])
def test_the_leader_overwrites_an_invalid_entry_with_its_next_broadcast(channels, invalid, caplog):
    leader, node = channels
    node._store.set("broadcast/1", invalid)
    assert node.read_broadcasts() == node.read_broadcasts() == []
    assert [record.args[0] for record in caplog.records] == ["broadcast/1"]
    leader.broadcast(StopAttempt(0, "why"))
    assert node.read_broadcasts() == [StopAttempt(0, "why")]


@pytest.mark.parametrize("invalid", INVALID)
def test_an_invalid_entry_of_the_inbox_is_read_again_until_its_sender_has_written_it(channels, invalid, caplog):
    leader, node = channels
    node._store.add("inbox", 1)
    node._store.set("inbox/1", invalid)
    assert leader.read_inbox() == leader.read_inbox() == []
    assert [record.args[0] for record in caplog.records] == ["inbox/1"]
    node._write("inbox/1", node._signed_name("inbox", 1), {"kind": "ShutdownAck", "group_rank": 1})
    assert leader.read_inbox() == [ShutdownAck(1)]


def test_announced_messages_that_are_never_written_are_forgotten_after_the_timeout(channels):
    leader, node = channels
    node._store.add("inbox", 1000)
    node.send_to_leader(ShutdownAck(1))
    assert leader.read_inbox() == [ShutdownAck(1)]
    deadline = time.monotonic() + 5.0
    while leader._missing_messages and time.monotonic() < deadline:
        assert leader.read_inbox() == []
    assert not leader._missing_messages


def test_a_signed_entry_that_was_copied_to_another_key_is_ignored():
    leader, node = open_channels(b"secret")
    leader.broadcast(StopAttempt(0, "why"))
    leader.broadcast(JobFinished())
    node.send_to_leader(AttemptFailing(1, 0))
    node._store.set("broadcast/3", node._store.get("broadcast/1"))
    node._store.add("inbox", 1)
    node._store.set("inbox/2", node._store.get("inbox/1"))
    assert node.read_broadcasts() == [StopAttempt(0, "why"), JobFinished()]
    assert leader.read_inbox() == [AttemptFailing(1, 0)]
