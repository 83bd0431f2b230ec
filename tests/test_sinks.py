"""What writes to the caller's streams: to such as are no plain files, when nobody reads, and when somebody else writes, too."""

import contextlib
import fcntl
import gzip
import io
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import talkers
from conftest import SPAWN, is_alive
from programs import ENV

import mpwatch
from mpwatch import LogSpec
from mpwatch.watcher.commands import WakeupPipe
from mpwatch.watcher.output.output_thread import OutputThread
from mpwatch.watcher.output.sinks import sink_of


@pytest.fixture
def given_up():
    """No reader is waited for."""
    with closing(WakeupPipe()) as bell:
        bell.wake()
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


def test_a_stream_that_packs_what_is_written_to_it(tmp_path):
    path = tmp_path / "packed"
    with gzip.open(path, "wt") as packed, contextlib.redirect_stdout(packed):
        print("before")
        mpwatch.run(talkers.says_hello, 1, logs=LogSpec())
        print("after")
    assert gzip.open(path, "rt").read() == "before\nout 0\nafter\n"


def test_a_stream_that_has_been_detached(caplog):
    stream = io.TextIOWrapper(io.BytesIO())
    stream.detach()
    with contextlib.redirect_stdout(stream):
        mpwatch.run(talkers.says_hello, 1, logs=LogSpec())
    (record,) = caplog.records
    assert "cannot be written to stdout any more (ValueError: underlying buffer has been detached)" in record.getMessage()


def test_ctrl_c_again_and_again_leaves_nothing(monkeypatch, eventually):
    """It strikes whenever a reader is waited for."""

    def strike(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(OutputThread, "settle", strike)
    reads, writes = os.pipe()
    with open(reads, "rb", 0), open(writes, "w") as stream, contextlib.redirect_stdout(stream):
        fill(writes)
        with pytest.raises(KeyboardInterrupt):
            mpwatch.run(talkers.says_hello, 1, logs=LogSpec())
        eventually(lambda: "mpwatch-output" not in {thread.name for thread in threading.enumerate()})


def test_after_ctrl_c_the_end_of_a_group_waits_no_longer_than_its_call():
    """For who does not read."""
    is_at_work = SPAWN.Event()

    def interrupt():
        is_at_work.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    reads, writes = os.pipe()
    with open(reads, "rb", 0), open(writes, "w") as stream, contextlib.redirect_stdout(stream):
        fill(writes)
        with pytest.raises(KeyboardInterrupt), mpwatch.WorkerGroup(1, logs=LogSpec()) as group:
            thread.start()
            group.run(talkers.says_hello_when_interrupted, (is_at_work,))
    thread.join()


def test_a_group_that_is_not_closed_loses_no_line_at_the_end_of_the_program(eventually):
    """However late it is read. It is more than the caller's pipe holds, and no more than that of the rank does."""
    program = (
        "import mpwatch, mpwatch.watcher.output.output_thread, os, sys, talkers\n"
        "mpwatch.watcher.output.output_thread.LAST_SECONDS = 0.0\n"
        "group = mpwatch.WorkerGroup(1, logs=mpwatch.LogSpec())\n"
        "group.run(talkers.counts_at_the_end, (2000,))\n"
        "print(group.run(os.getpid)[0], file=sys.stderr)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=ENV, **pipes) as process:
        pid = int(process.stderr.readline())
        eventually(lambda: not is_alive(pid))
        assert len(process.stdout.read()) == 200_000
    assert process.returncode == 0


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
    with closing(WakeupPipe()) as bell, open(path, "r+b", 0) as reads, open(path, "w") as stream:
        with closing(sink_of(stream, bell.fileno())) as sink:
            assert sink.write(data) is True
        assert reads.read(1 << 16) == data
