"""Tests of one real rank process and one real guardian, without the event loop."""

import fcntl
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait

import pytest

import mpwatch
from mpwatch.os_support.hardware import count_usable_cpus
from mpwatch.os_support.processes import peek_exit_code
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.processes.guardian import Guardian
from mpwatch.watcher.processes.process import UNKNOWN_EXIT, RankPopen
from mpwatch.watcher.processes.rank_environment import reserve_port
from mpwatch.wire.launch import LaunchInfo
from mpwatch.wire.messages import HEADER, READY_BODY, FrameDecoder, MessageKind, encode_call, encode_frame
from mpwatch.wire.pickling import call_payload, return_values
from mpwatch.wire.shared_memory import BLACK_BOX_SIZE, SLOT_SIZE, BlackBox, open_slot, read_black_box
from support import functions
from support.process_state import is_alive
from support.programs import ENV, python


@pytest.fixture
def rank():
    """The process of a rank that is ready and waits for a call, and its channel."""
    ours, theirs = socket.socketpair()
    slots, stacks = os.memfd_create("mpwatch-test"), os.memfd_create("stacks")
    os.ftruncate(slots, SLOT_SIZE)
    launch_info = LaunchInfo({}, theirs.fileno(), slots, 0, 1, is_captured=False)
    fds = [theirs.fileno(), slots]
    process = RankPopen.start(launch_info, name="a-rank", env=dict(os.environ), stdout=None, stderr=stacks, passed_fds=fds)
    theirs.close()
    with ours:
        (ready,) = FrameDecoder().feed(ours.recv(1000))
        assert ready.kind is MessageKind.READY
        assert len(ready.body) == READY_BODY.size
        yield process, ours
    process.kill()
    process.wait()
    process.reap()
    os.close(slots)
    os.close(stacks)


def child_of_multiprocessing(pid):
    (child,) = (child for child in multiprocessing.active_children() if child.pid == pid)
    return child


def test_a_rank_is_a_process_of_multiprocessing_and_leads_a_group(rank):
    process, _ = rank
    child = child_of_multiprocessing(process.pid)
    assert child.name == "a-rank"
    assert child.is_alive()
    assert os.getpgid(child.pid) == child.pid
    assert isinstance(child, multiprocessing.context.SpawnProcess)


def test_a_rank_exits_when_the_watcher_sends_shutdown(rank):
    process, channel = rank
    channel.sendall(encode_frame(MessageKind.SHUTDOWN))
    assert wait([process.sentinel], 20)
    assert process.read_exit_code() == 0


def test_a_rank_exits_when_the_channel_closes(rank):
    process, channel = rank
    channel.close()
    assert wait([process.sentinel], 20)
    assert process.read_exit_code() == 0


def test_another_thread_can_join_a_rank_while_the_watcher_reaps_it(rank):
    process, channel = rank
    child = child_of_multiprocessing(process.pid)
    with ThreadPoolExecutor() as threads:
        joined = threads.submit(child.join)
        channel.close()
        assert process.wait_for_exit(time.monotonic() + 20)
        assert process.reap()
        joined.result(20)
    assert child.exitcode == 0
    assert child not in multiprocessing.active_children()


def test_a_dead_rank_stays_a_zombie_until_it_is_reaped(rank):
    process, _ = rank
    child = child_of_multiprocessing(process.pid)
    child.terminate()
    wait([process.sentinel])
    assert child.exitcode == -signal.SIGTERM
    multiprocessing.active_children()  # polls every child, and must not reap this one
    assert peek_exit_code(process.pid) == -signal.SIGTERM
    process.reap()
    with pytest.raises(ChildProcessError):
        peek_exit_code(process.pid)


def test_the_exit_code_of_a_rank_that_other_code_has_reaped_is_unknown(rank):
    process, _ = rank
    child = child_of_multiprocessing(process.pid)
    process.kill()
    wait([process.sentinel])
    os.waitpid(process.pid, 0)
    assert child.exitcode == UNKNOWN_EXIT
    assert process.read_exit_code() is None
    process.send_signal_to_group(signal.SIGTERM)
    process.reap()


def start_helper(channel):
    """Let the rank start a process in its group. Return the pid."""
    start = call_payload.Call(os.posix_spawnp, ("sleep", ["sleep", "60"], {}), {}, None)
    payload = call_payload.pack(start)
    channel.sendall(encode_call(1, payload.body))
    frames, messages = FrameDecoder(), []
    while not messages:
        data = channel.recv(1000)
        assert data, "the rank has closed its channel"
        messages = frames.feed(data)
    (answer,) = messages
    assert answer.kind is MessageKind.RETURNED
    return return_values.open_value(answer.body)[1].load()


def test_a_signal_reaches_the_processes_that_a_rank_has_started(rank, eventually):
    process, channel = rank
    helper = start_helper(channel)
    try:
        assert os.getpgid(helper) == process.pid
        process.send_signal_to_group(signal.SIGTERM)
        eventually(lambda: not is_alive(helper))
    finally:
        with suppress(ProcessLookupError):
            os.kill(helper, signal.SIGKILL)


def test_the_processes_that_a_dead_rank_has_left_are_killed_before_it_is_reaped(rank, eventually):
    process, channel = rank
    helper = start_helper(channel)
    try:
        process.send_signal(signal.SIGKILL)  # to the rank alone
        assert wait([process.sentinel], 20)
        assert is_alive(helper)
        assert process.reap()
        eventually(lambda: not is_alive(helper))
    finally:
        with suppress(ProcessLookupError):
            os.kill(helper, signal.SIGKILL)


def test_the_guardian_kills_guarded_groups_when_its_program_dies(eventually):
    code = (
        "import os, signal, subprocess, sys\n"
        "from mpwatch.watcher.processes.guardian import Guardian\n"
        "from mpwatch.watcher.observers.deferred_log import DeferredLog\n"
        "wait = [sys.executable, '-S', '-c', 'import signal; signal.pause()']\n"
        "guarded, released = (subprocess.Popen(wait, process_group=0, stdout=2) for _ in range(2))\n"
        "guardian = Guardian(DeferredLog(lambda: None))\n"
        "for group in (guarded, released): guardian.guard(group.pid)\n"
        "guardian.release(released.pid)\n"
        "print(guarded.pid, released.pid, guardian._pid, flush=True)\n"
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


def test_closing_a_guardian_kills_no_group(eventually):
    guarded = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], process_group=0)
    guardian = Guardian(DeferredLog(lambda: None))
    guardian.guard(guarded.pid)
    eventually(lambda: not any(fcntl.ioctl(guardian._socket, termios.TIOCOUTQ, bytes(4))))  # it has read its order
    guardian.close()
    assert guarded.poll() is None
    guarded.kill()
    assert guarded.wait() == -signal.SIGKILL


def test_the_black_box_keeps_whole_frames_or_none():
    slots = os.memfd_create("mpwatch-test")
    os.ftruncate(slots, 2 * SLOT_SIZE)
    black_box = BlackBox(open_slot(os.dup(slots), 1))
    assert read_black_box(slots, 1) == []
    assert black_box.append(encode_frame(MessageKind.RAISED, b"first"))
    assert not black_box.append(encode_frame(MessageKind.DETAILS, bytes(SLOT_SIZE)))
    assert black_box.append(encode_frame(MessageKind.DETAILS, b"second"))
    assert [(message.kind, message.body) for message in read_black_box(slots, 1)] == [
        (MessageKind.RAISED, b"first"),
        (MessageKind.DETAILS, b"second"),
    ]
    assert read_black_box(slots, 0) == []
    os.close(slots)


def test_a_full_black_box_is_read_and_an_overwritten_one_is_refused():
    slots = os.memfd_create("mpwatch-test")
    os.ftruncate(slots, SLOT_SIZE)
    black_box = BlackBox(open_slot(os.dup(slots), 0))
    assert black_box.append(encode_frame(MessageKind.RETURNED, bytes(BLACK_BOX_SIZE - HEADER.size)))
    assert [len(message.body) for message in read_black_box(slots, 0)] == [BLACK_BOX_SIZE - HEADER.size]
    for garbage in (b"x" * 100, HEADER.pack(b"mpw1", MessageKind.RETURNED, 0.0, 2 * SLOT_SIZE)):
        os.pwrite(slots, garbage, 0)
        with pytest.raises(ValueError, match=r"not a message|a message of"):
            read_black_box(slots, 0)
    os.close(slots)


def test_the_kernel_gives_a_reserved_port_to_no_program_that_asks_for_any_port():
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        for _ in range(2000):
            with socket.socket() as other:
                other.bind(("", 0))
                assert other.getsockname()[1] != port
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()


def test_a_rank_gets_a_long_command_line(monkeypatch):
    """It is longer than a pipe's default size. The watcher must not wait for the child to read it."""
    monkeypatch.setattr(sys, "argv", ["x" * 100] * 3000)
    assert mpwatch.run(functions.count_arguments, 2)[1] == 3000


def test_count_usable_cpus_follows_the_affinity():
    code = (
        "import os; os.sched_setaffinity(0, {0})\n"
        "from mpwatch.os_support.hardware import count_usable_cpus; print(count_usable_cpus())"
    )
    assert python("-c", code).stdout == "1\n"
    assert count_usable_cpus() >= 1


def test_no_process_object_is_left_where_the_garbage_collector_is_off():
    gc.collect()
    gc.disable()
    try:
        before = len(multiprocessing.process._dangling)
        mpwatch.run(functions.rank, 2)
        assert len(multiprocessing.process._dangling) == before
    finally:
        gc.enable()
