"""One real rank's process, and one real guardian: tier two, without the loop."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import wait

import functions
import pytest
from conftest import is_alive
from programs import ENV, python

import mpwatch
from mpwatch.os_support.hardware import usable_cpus
from mpwatch.os_support.processes import peek_exit
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.processes.guardian import Guardian
from mpwatch.watcher.processes.process import UNKNOWN_EXIT, WatchedProcess
from mpwatch.watcher.processes.rank_environment import reserve_port
from mpwatch.wire.launch import LaunchInfo
from mpwatch.wire.messages import HEADER, WHERE, FrameDecoder, MessageKind, frame
from mpwatch.wire.shared_memory import SLOT, WORDS, BlackBox, open_slot, read_answer


@pytest.fixture
def rank():
    """A rank that has said READY and waits for a call; its channel."""
    ours, theirs = socket.socketpair()
    box, stacks = os.memfd_create("mpwatch-test"), os.memfd_create("stacks")
    os.ftruncate(box, SLOT)
    seat = LaunchInfo({}, theirs.fileno(), box, 0, 1, is_captured=False)
    process = WatchedProcess(seat, dict(os.environ), [theirs.fileno(), box], (None, stacks), "a-rank")
    process.start()
    theirs.close()
    with ours:
        (ready,) = FrameDecoder().feed(ours.recv(1000))
        assert ready.kind is MessageKind.READY
        assert len(ready.body) == WHERE.size
        yield process, ours
    if not process._closed:
        process.kill()
        wait([process.sentinel])
        process.reap()
    os.close(box)
    os.close(stacks)


def test_it_is_a_process_of_multiprocessing_and_leads_a_group(rank):
    process, _ = rank
    assert process in multiprocessing.active_children()
    assert process.is_alive()
    assert os.getpgid(process.pid) == process.pid
    assert isinstance(process, multiprocessing.context.SpawnProcess)


def test_it_ends_when_told_and_when_the_channel_closes(rank):
    process, channel = rank
    channel.sendall(frame(MessageKind.SHUTDOWN))
    assert wait([process.sentinel], 20)
    assert process.exitcode == 0


def test_it_ends_when_the_channel_closes(rank):
    process, channel = rank
    channel.close()
    assert wait([process.sentinel], 20)
    assert process.exitcode == 0


def test_a_death_is_seen_before_it_is_reaped(rank):
    process, _ = rank
    pid = process.pid
    process.terminate()
    wait([process.sentinel])
    assert process.exitcode == -signal.SIGTERM
    multiprocessing.active_children()  # has a look at every child, and must not take this one
    assert peek_exit(pid) == -signal.SIGTERM
    process.reap()
    with pytest.raises(ChildProcessError):
        peek_exit(pid)


def test_a_status_that_somebody_else_has_taken_is_unknown(rank):
    process, _ = rank
    process.kill()
    wait([process.sentinel])
    os.waitpid(process.pid, 0)
    assert process.exitcode == UNKNOWN_EXIT
    assert not process.exit_is_known()
    process.signal_group(signal.SIGTERM)
    process.reap()


def test_the_guardian_kills_what_it_guards_when_its_program_dies(eventually):
    code = (
        "import os, signal, subprocess, sys\n"
        "from mpwatch.watcher.processes.guardian import Guardian\n"
        "from mpwatch.watcher.observers.deferred_log import DeferredLog\n"
        "wait = [sys.executable, '-S', '-c', 'import signal; signal.pause()']\n"
        "guarded, released = (subprocess.Popen(wait, process_group=0, stdout=2) for _ in range(2))\n"
        "guardian = Guardian(DeferredLog(lambda: None))\n"
        "for group in (guarded, released): guardian.guard(group.pid)\n"
        "guardian.release(released.pid)\n"
        "print(guarded.pid, released.pid, guardian._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    guarded, released, guardian = map(int, done.stdout.split())
    try:
        eventually(lambda: not is_alive(guarded), seconds=1)
        eventually(lambda: not is_alive(guardian), seconds=1)
        assert is_alive(released)
    finally:
        os.kill(released, signal.SIGKILL)


def test_a_guardian_that_is_closed_is_gone():
    guardian = Guardian(DeferredLog(lambda: None))
    guardian.guard(os.getpid())  # not to be killed by it: closing is no death
    guardian.close()


def test_the_black_box_keeps_whole_frames_or_none():
    box = os.memfd_create("mpwatch-test")
    os.ftruncate(box, 2 * SLOT)
    words = BlackBox(open_slot(os.dup(box), 1))
    assert read_answer(box, 1) == []
    assert words.leave(frame(MessageKind.RAISED, b"first"))
    assert not words.leave(frame(MessageKind.DETAILS, bytes(SLOT)))
    assert words.leave(frame(MessageKind.DETAILS, b"second"))
    assert [(message.kind, message.body) for message in read_answer(box, 1)] == [
        (MessageKind.RAISED, b"first"),
        (MessageKind.DETAILS, b"second"),
    ]
    assert read_answer(box, 0) == []
    os.close(box)


def test_a_black_box_may_be_full_and_what_has_been_overwritten_is_refused():
    box = os.memfd_create("mpwatch-test")
    os.ftruncate(box, SLOT)
    words = BlackBox(open_slot(os.dup(box), 0))
    assert words.leave(frame(MessageKind.RETURNED, bytes(WORDS - HEADER.size)))
    assert [len(message.body) for message in read_answer(box, 0)] == [WORDS - HEADER.size]
    for garbage in (b"x" * 100, HEADER.pack(b"mpw1", MessageKind.RETURNED, 0.0, 2 * SLOT)):
        os.pwrite(box, garbage, 0)
        with pytest.raises(ValueError, match=r"not a message|a message of"):
            read_answer(box, 0)
    os.close(box)


def test_frames_come_in_any_pieces_and_garbage_is_refused():
    data = frame(MessageKind.READY) + frame(MessageKind.RETURNED, b"x" * 1000)
    frames = FrameDecoder()
    messages = [message for byte in data for message in frames.feed(bytes([byte]))]
    assert [(message.kind, len(message.body)) for message in messages] == [
        (MessageKind.READY, 0),
        (MessageKind.RETURNED, 1000),
    ]
    with pytest.raises(ValueError, match="not a message of mpwatch"):
        frames.feed(b"something else, and long enough")


def test_a_reserved_port_is_given_to_nobody_who_asks_for_any():
    with reserve_port() as keeper:
        port = keeper.getsockname()[1]
        for _ in range(2000):
            with socket.socket() as other:
                other.bind(("", 0))
                assert other.getsockname()[1] != port
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()


def test_a_long_command_line_is_handed_on(monkeypatch):
    """More than a pipe holds by default: to write it must not wait for the child."""
    monkeypatch.setattr(sys, "argv", ["x" * 100] * 3000)
    assert mpwatch.run(functions.length_of_argv, 2)[1] == 3000


def test_usable_cpus_follow_the_affinity():
    code = (
        "import os; os.sched_setaffinity(0, {0}); from mpwatch.os_support.hardware import usable_cpus; print(usable_cpus())"
    )
    assert python("-c", code).stdout == "1\n"
    assert usable_cpus() >= 1
