"""The process of one rank: start it, send it signals, read its exit code, reap it. Runs in the watcher thread.

A rank is a process as the start method "spawn" of multiprocessing starts it, with these differences:

- It does not import the `__main__` module of the calling program, and may have a daemonic process as its parent.
- From its first instruction on, it leads its own process group, so a signal to the group also reaches the processes that it
  starts. Before that, mpwatch also sets its CPUs, environment, stdin (which is empty), stdout and stderr.
- Its sentinel is a pidfd or, where the system has none, a socket that a thread shuts down at its death. Spawn's own is a
  pipe of the child, which a process that the child has forked keeps open, and `os.exec` closes.

Guarantee: the process group of a dead rank is killed before the rank is reaped. Until then no other process can get its pid.
"""

import errno
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from multiprocessing import current_process, get_start_method, reduction, resource_tracker, spawn
from multiprocessing.connection import wait
from multiprocessing.context import set_spawning_popen
from typing import Any

from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.cpython_private import get_logging_setup, get_original_dir
from mpwatch.os_support.descriptors import grow_pipe
from mpwatch.os_support.hardware import limit_thread_to
from mpwatch.os_support.processes import open_pidfd, peek_exit_code, start_process
from mpwatch.wire.launch import LaunchInfo, RankProcess

RANK_PROGRAM = "mpwatch.worker.main"  # the module that runs in a rank; the watcher never imports it
DEFAULT_PIPE_SIZE = 1 << 16  # bytes that a pipe holds where the system does not report the size
STATUS_SECONDS = 0.05  # after the end of a rank that is traced, as by strace: the tracer gets the exit code first
POLL_SECONDS = 0.001
TOLERATE_FAILURE = suppress(ProcessLookupError, PermissionError)  # a setuid helper, for example, may not be signalled


class WatchedProcess:
    """`pid` is also the number of the process group. `sentinel` is readable when the process has ended."""

    def __init__(
        self,
        launch_info: LaunchInfo,  # what the rank reads first
        name: str,
        *,
        description: Sequence[str],  # `ps` shows it at the end of the command line
        env: dict[str, str],
        stdout: int | None,  # None: that of this process
        stderr: int,
        passed_fds: Sequence[int],
        cpus: frozenset[int] | None,  # None: those of this process
    ) -> None:
        """Start a rank. Raises OSError and RuntimeError."""
        tracker_fd: Any = resource_tracker.getfd()
        data = _pickle(RankProcess(launch_info, RANK_PROGRAM, name=name, start_method=get_start_method(allow_none=True)))
        self._is_reaped = False
        self._exit_code: int | None = None
        self._exit_thread: threading.Thread | None = None
        with ExitStack() as kept, ExitStack() as passed:
            child_r, parent_w = os.pipe()
            passed.callback(os.close, child_r)
            kept.callback(os.close, parent_w)  # it stays open, because parent_process() in the child watches it
            _fill_pipe(parent_w, data)
            command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
            if not getattr(sys, "frozen", False):  # there multiprocessing reads all arguments (freeze_support)
                # Without -P, a signal.py in the current folder would run instead of Python's own module.
                command = [command[0], "-P", *command[1:], *description]
            fds = [child_r, tracker_fd, *passed_fds]
            with limit_thread_to(cpus):  # the rank inherits it, so its interpreter is bound from the start
                self.pid = start_process(command, env, fds, stdout=stdout, stderr=stderr, leads_group=True)
            with ExitStack() as if_unwatched:
                if_unwatched.callback(os.waitpid, self.pid, 0)
                if_unwatched.callback(os.kill, self.pid, signal.SIGKILL)
                pidfd = open_pidfd(self.pid)
                self.sentinel = self._start_exit_thread() if pidfd is None else pidfd
                if_unwatched.pop_all()
            kept.callback(os.close, self.sentinel)
            self._descriptors = kept.pop_all()

    def _start_exit_thread(self) -> int:
        """Return a descriptor that becomes readable when the rank has ended."""
        ours, theirs = socket.socketpair()
        self._exit_thread = threading.Thread(target=self._shut_down_at_exit, args=[theirs], name="mpwatch exit", daemon=True)
        with closing(ours):
            try:
                self._exit_thread.start()
            except BaseException:
                theirs.close()
                raise
            return ours.detach()

    def _shut_down_at_exit(self, end: socket.socket) -> None:
        with end:
            with suppress(ChildProcessError):
                self._exit_code = peek_exit_code(self.pid, block=True)
            end.shutdown(socket.SHUT_RDWR)  # a close would not reach the other end while a fork of this program has a copy

    def read_exit_code(self) -> int | None:
        """Return the exit code of a dead rank. None: SIGCHLD is ignored, or other code or a debugger (ptrace) has it."""
        deadline = monotonic() + STATUS_SECONDS
        with suppress(ChildProcessError):
            while self._exit_code is None:
                self._exit_code = peek_exit_code(self.pid)
                if self._exit_code is not None or monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
        return self._exit_code

    def wait_for_exit(self, deadline: float) -> bool:
        """Wait until a time of CLOCK_MONOTONIC. Return whether the rank has ended."""
        return bool(wait([self.sentinel], max(0.0, deadline - monotonic())))

    def send_signal_to_group(self, number: int) -> None:
        """Send a signal to the rank, and to all other processes in the rank's process group."""
        if self._is_reaped:
            return
        with TOLERATE_FAILURE:
            os.killpg(self.pid, number)
        with TOLERATE_FAILURE:
            if os.getpgid(self.pid) != self.pid:  # the rank has joined another group
                os.kill(self.pid, number)

    def send_signal(self, number: int) -> None:
        with TOLERATE_FAILURE:
            if not self._is_reaped:
                os.kill(self.pid, number)

    def reap(self) -> None:
        """Kill what is left in the group of a dead rank, and reap the rank, unless a debugger (ptrace) holds it."""
        self.read_exit_code()
        self.send_signal_to_group(signal.SIGKILL)
        with suppress(ChildProcessError):  # other code has reaped it
            os.waitpid(self.pid, os.WNOHANG)
        if self._exit_thread is not None:
            self._exit_thread.join()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors of a rank. If it cannot be killed, and so was not reaped, it will be a zombie."""
        self._is_reaped = True
        self._descriptors.close()


def _pickle(process: RankProcess) -> bytes:
    data = io.BytesIO()
    spawning: Any = process  # pickling only asks whether there is one
    set_spawning_popen(spawning)
    try:
        pickle.dump(_make_preparation_data(process), data)
        reduction.dump(process, data)
    finally:
        set_spawning_popen(None)
    return data.getvalue()


def _fill_pipe(pipe: int, data: bytes) -> None:
    """Before the child is started: later, a write could block, because the child may not read."""
    os.set_blocking(pipe, False)
    size = grow_pipe(pipe, len(data)) or DEFAULT_PIPE_SIZE
    if size < len(data) or os.write(pipe, data) < len(data):
        raise OSError(
            errno.EMSGSIZE,
            f"sys.argv and sys.path take {len(data)} bytes, and a pipe holds {size} here; shorten them, or see "
            "/proc/sys/fs/pipe-max-size and pipe-user-pages-soft",
        )
    os.set_blocking(pipe, True)


def _resolve(entry: str) -> str:
    """Return the folder that an entry of sys.path means to this program, even if the program has called os.chdir since."""
    return getattr(sys.path_importer_cache.get(entry), "path", entry)


def _make_preparation_data(process: RankProcess) -> dict[str, Any]:
    """What spawn sends to a child before the Process object, without `__main__` and the start method."""
    original_dir = get_original_dir()
    return {
        "name": process.name,
        "authkey": current_process().authkey,
        "sys_path": [original_dir if entry == "" and original_dir is not None else _resolve(entry) for entry in sys.path],
        "sys_argv": sys.argv,
        "orig_dir": original_dir,
        "dir": os.getcwd(),
        **get_logging_setup(),
    }
