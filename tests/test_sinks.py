"""What writes to the caller's streams, when nobody reads them and when somebody else writes to them, too."""

import contextlib
import fcntl
import os
import select
import socket
import threading
from contextlib import closing

import pytest
import talkers

import mpwatch
from mpwatch import LogSpec
from mpwatch.watcher.mailbox import Bell
from mpwatch.watcher.pump import Pump
from mpwatch.watcher.sinks import sink_of


@pytest.fixture
def given_up():
    """No reader is waited for."""
    with closing(Bell()) as bell:
        bell.ring()
        yield bell.fileno()


def fill(fd):
    """Until there is room for nothing more."""
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fd, b"." * select.PIPE_BUF)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fd, b".")
    os.set_blocking(fd, True)


def test_ctrl_c_again_and_again_leaves_nothing(monkeypatch, eventually):
    """It strikes whenever a reader is waited for."""

    def strike(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Pump, "settle", strike)
    reads, writes = os.pipe()
    with open(reads, "rb", 0), open(writes, "w") as stream, contextlib.redirect_stdout(stream):
        fill(writes)
        with pytest.raises(KeyboardInterrupt):
            mpwatch.run(talkers.says_hello, 1, logs=LogSpec())
        eventually(lambda: "mpwatch-output" not in {thread.name for thread in threading.enumerate()})


def test_a_socket_that_is_full_is_not_written_to(given_up):
    """It cannot be opened anew, and to write to it would block, for as long as nobody reads."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(theirs.detach(), "w") as stream:
        fill(stream.fileno())
        with closing(sink_of(stream, given_up)) as sink:
            assert sink.write(b"a line\n") is False


def test_who_writes_to_the_same_pipe_comes_between_lines(given_up):
    line = b"x" * 999 + b"\n"
    reads, writes = os.pipe()
    with open(reads, "rb", 0) as ours, open(writes, "w") as stream:
        size = fcntl.fcntl(ours, fcntl.F_GETPIPE_SZ)
        fill(stream.fileno())
        ours.read(select.PIPE_BUF * 2)
        with closing(sink_of(stream, given_up)) as sink:
            assert sink.write(line * 100) is False
        os.set_blocking(reads, False)
        assert ours.read(size).lstrip(b".") == line * 8


def test_a_line_that_is_longer_than_what_a_pipe_takes_in_one_piece(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = b"a\n" + b"x" * (3 * select.PIPE_BUF) + b"\nb\n"
    with closing(Bell()) as bell, open(path, "r+b", 0) as reads, open(path, "w") as stream:
        with closing(sink_of(stream, bell.fileno())) as sink:
            assert sink.write(data) is True
        assert reads.read(1 << 16) == data
