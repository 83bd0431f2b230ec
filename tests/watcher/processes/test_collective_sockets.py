"""CollectiveSockets: what the watcher reads of a rank that answers late, in pieces, wrongly, or not at all."""

import os
import socket
from contextlib import closing, suppress

import pytest

from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.processes.collective_sockets import MAX_ANSWER, CollectiveSockets
from mpwatch.watcher.processes.selector import Selector

ANSWER = RankCollectives(place="train.py:1 in f")
LINE = ANSWER.to_json().encode() + b"\n"


@pytest.fixture
def selector():
    with Selector() as made:
        yield made


@pytest.fixture
def sockets():
    with closing(CollectiveSockets()) as made:
        yield made


def connect(sockets, selector, *, is_crash_socket=False):
    """Open one of the two sockets, and return the end of the rank."""
    ours, theirs = socket.socketpair()
    sockets.open(selector, os.dup(theirs.fileno()), lambda: None, is_crash_socket=is_crash_socket)
    theirs.close()
    return ours


def test_a_rank_without_sockets_cannot_be_asked(sockets):
    assert not sockets.ask()
    assert not sockets.is_open
    assert sockets.read_crash() == b""


def test_a_rank_is_asked_once_until_it_answers(sockets, selector):
    with connect(sockets, selector) as rank:
        assert sockets.ask()
        assert sockets.ask()
        assert rank.recv(10) == b"?"
        assert sockets.is_pending
        rank.sendall(LINE)
        assert sockets.read_answer() == ANSWER
        assert not sockets.is_pending


def test_an_answer_in_two_pieces(sockets, selector):
    with connect(sockets, selector) as rank:
        sockets.ask()
        rank.sendall(LINE[:5])
        assert sockets.read_answer() is None
        assert sockets.is_pending
        rank.sendall(LINE[5:])
        assert sockets.read_answer() == ANSWER


def test_nothing_to_read(sockets, selector):
    with connect(sockets, selector):
        sockets.ask()
        assert sockets.read_answer() is None
        assert sockets.is_open


@pytest.mark.parametrize("text", [b"\n", b"nonsense\n", b'{"place": 1}\n'], ids=["empty", "no JSON", "other JSON"])
def test_a_rank_that_answers_nonsense_is_not_asked_again(sockets, selector, text):
    with connect(sockets, selector) as rank:
        sockets.ask()
        rank.sendall(text)
        assert sockets.read_answer() is None
        assert not sockets.is_open
        assert not sockets.is_pending
        assert not sockets.ask()


def test_a_rank_that_closes_its_end_is_not_asked_again(sockets, selector):
    connect(sockets, selector).close()
    assert not sockets.ask()
    assert sockets.read_answer() is None
    assert not sockets.is_open


def test_an_endless_answer_is_cut(sockets, selector):
    with connect(sockets, selector) as rank:
        sockets.ask()
        rank.setblocking(False)
        for _ in range(MAX_ANSWER):
            with suppress(BlockingIOError, BrokenPipeError):
                rank.send(bytes(1 << 16))
            sockets.read_answer()
            if not sockets.is_open:
                return
        pytest.fail("the watcher reads without end")


def test_a_crash_waits_for_the_answer(sockets, selector):
    with connect(sockets, selector) as rank, connect(sockets, selector, is_crash_socket=True) as crash:
        crash.sendall(b"Fatal Python error: Aborted")
        assert sockets.hold_crash()
        assert rank.recv(10) == b"?"
        assert not sockets.hold_crash()  # it has waited before
        assert sockets.read_crash() == b"Fatal Python error: Aborted"
        crash.sendall(b" (more)")
        assert sockets.read_crash() == b" (more)"


def test_the_crash_socket_of_a_rank_that_ends_is_not_a_crash(sockets, selector):
    with connect(sockets, selector):
        connect(sockets, selector, is_crash_socket=True).close()
        assert not sockets.hold_crash()
        assert sockets.read_crash() == b""
