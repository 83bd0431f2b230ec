"""Sinks for the caller's streams: streams that are not plain files, readers that do not read, and other writers."""

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

import mpwatch
from mpwatch import LogSpec
from mpwatch.watcher.output.output_thread import OutputThread
from mpwatch.watcher.output.sinks import open_sink
from mpwatch.watcher.wakeup_pipe import WakeupPipe
from support.process_state import SPAWN, is_alive
from support.programs import ENV
from watcher.output import printing_functions


@pytest.fixture
def stop_fd():
    """A descriptor by which sinks wait for no reader."""
    with closing(WakeupPipe()) as wakeup:
        wakeup.wake()
        yield wakeup.fileno()


def fill(fd):
    """Write until the pipe or socket is full."""
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fd, b"." * select.PIPE_BUF)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fd, b".")
    os.set_blocking(fd, True)


def test_a_gzip_stream(tmp_path):
    path = tmp_path / "packed"
    with gzip.open(path, "wt") as packed, contextlib.redirect_stdout(packed):
        print("before")
        mpwatch.run(printing_functions.print_hello, 1, logs=LogSpec())
        print("after")
    assert gzip.open(path, "rt").read() == "before\nout 0\nafter\n"


def test_a_detached_stream(caplog):
    stream = io.TextIOWrapper(io.BytesIO())
    stream.detach()
    with contextlib.redirect_stdout(stream):
        mpwatch.run(printing_functions.print_hello, 1, logs=LogSpec())
    (record,) = caplog.records
    assert (
        "can no longer be written to stdout: its rest is dropped (ValueError: underlying buffer has been detached)"
        in record.getMessage()
    )


def test_repeated_ctrl_c_leaves_no_thread(monkeypatch, eventually):
    """A KeyboardInterrupt is raised in every wait for the reader."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(OutputThread, "drain_all", interrupt)
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb", 0), open(write_fd, "w") as stream, contextlib.redirect_stdout(stream):
        fill(write_fd)
        with pytest.raises(KeyboardInterrupt):
            mpwatch.run(printing_functions.print_hello, 1, logs=LogSpec())
        eventually(lambda: "mpwatch-output" not in {thread.name for thread in threading.enumerate()})


def test_after_ctrl_c_a_group_does_not_wait_again_for_the_reader():
    is_running = SPAWN.Event()

    def interrupt():
        is_running.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb", 0), open(write_fd, "w") as stream, contextlib.redirect_stdout(stream):
        fill(write_fd)
        with pytest.raises(KeyboardInterrupt), mpwatch.WorkerGroup(1, logs=LogSpec()) as group:
            thread.start()
            group.run(printing_functions.print_hello_when_interrupted, (is_running,))
    thread.join()


def test_a_group_that_is_not_closed_loses_no_line_at_exit(eventually):
    """The reader reads late. The output is larger than the caller's pipe, and fits into the pipe of the rank."""
    program = (
        "import mpwatch, mpwatch.watcher.output.output_thread, os, sys\n"
        "from watcher.output import printing_functions\n"
        "mpwatch.watcher.output.output_thread.LAST_DRAIN_SECONDS = 0.0\n"
        "group = mpwatch.WorkerGroup(1, logs=mpwatch.LogSpec())\n"
        "group.run(printing_functions.print_lines_at_exit, (2000,))\n"
        "print(group.run(os.getpid)[0], file=sys.stderr)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=ENV, **pipes) as process:
        pid = int(process.stderr.readline())
        eventually(lambda: not is_alive(pid))
        assert len(process.stdout.read()) == 200_000
    assert process.returncode == 0


def test_a_full_socket_is_not_written_to(stop_fd):
    """A socket cannot be opened a second time, and a write to it would block as long as there is no reader."""
    read_end, write_end = socket.socketpair()
    with read_end, write_end, open(write_end.detach(), "w") as stream:
        fill(stream.fileno())
        with closing(open_sink(stream, stop_fd)) as sink:
            assert sink.write(b"a line\n") is False


def test_another_writer_of_the_same_pipe_comes_between_lines(stop_fd):
    line = b"x" * 999 + b"\n"
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb", 0) as read_end, open(write_fd, "w") as stream:
        size = fcntl.fcntl(read_end, fcntl.F_GETPIPE_SZ)
        fill(stream.fileno())
        read_end.read(select.PIPE_BUF * 2)
        with closing(open_sink(stream, stop_fd)) as sink:
            assert sink.write(line * 100) is False
        os.set_blocking(read_fd, False)
        assert read_end.read(size).lstrip(b".") == line * 8


def test_a_line_longer_than_an_atomic_write(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = b"a\n" + b"x" * (3 * select.PIPE_BUF) + b"\nb\n"
    with closing(WakeupPipe()) as wakeup, open(path, "r+b", 0) as reader, open(path, "w") as stream:
        with closing(open_sink(stream, wakeup.fileno())) as sink:
            assert sink.write(data) is True
        assert reader.read(1 << 16) == data
