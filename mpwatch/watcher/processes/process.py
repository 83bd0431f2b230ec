"""The process of one rank: start it, send it signals, read its exit code, reap it. Runs in the watcher.

    ProcessPool.start -> RankPopen.start -> RankPopen._launch -> posix_spawn

A rank is an ordinary multiprocessing.Process of the spawn context. So `multiprocessing.active_children()` lists the rank,
and any thread may call the rank's `join`. The start of a rank differs from the start of other such processes in four
points:

- The rank does not import the `__main__` module of the calling program. After mpwatch has started a rank, the
  calling program can still call `multiprocessing.set_start_method`.
- From its first instruction on, the rank leads its own process group, so a signal to the group also reaches the processes
  that the rank starts. Before the rank's first instruction, mpwatch also sets the CPUs, the environment, stdin, stdout and
  stderr of the rank. The rank's stdin is empty.
- A daemonic process, such as a worker of Dask or of multiprocessing.Pool, can start ranks, which end with it in any case.
- The sentinel of a rank is a pidfd or, where the system has none, a socket that a thread shuts down at its death. The
  sentinel of an ordinary multiprocessing.Process is a pipe of the child, which a process that the child has forked keeps
  open, and `os.exec` closes.

Guarantee: mpwatch kills the process group of a dead rank before it reaps the rank. Until a rank is reaped, no other process
can get the rank's pid.

The docstring of os_support/cpython_private.py says which private names of multiprocessing are used and overridden here, and
what breaks without them.
"""

import errno
import io
import multiprocessing.process
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing import current_process, get_start_method, reduction, resource_tracker, spawn
from multiprocessing.connection import wait
from multiprocessing.context import set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from typing import Any, NamedTuple, Self

from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.descriptors import grow_pipe
from mpwatch.os_support.hardware import limit_thread_to
from mpwatch.os_support.processes import open_pidfd, peek_exit_code, start_process
from mpwatch.wire.launch import LaunchInfo, RankProcess

# typeshed has only the public names of these modules
mp_process: Any = multiprocessing.process
mp_util: Any = multiprocessing.util
RANK_PROGRAM = "mpwatch.worker.main"  # the module that runs in a rank; the watcher never imports it
DEFAULT_PIPE_SIZE = 1 << 16  # bytes that a pipe holds where the system does not report the size
STATUS_SECONDS = 0.05  # after the end of a rank that is traced, as by strace: the tracer gets the exit code first
POLL_SECONDS = 0.001
UNKNOWN_EXIT = 255  # the exit code of a child that other code has reaped
TOLERATE_FAILURE = suppress(ProcessLookupError, PermissionError)  # a setuid helper, for example, may not be signalled


class Surroundings(NamedTuple):
    """What a rank has from its first instruction on."""

    description: Sequence[str]  # `ps` shows it at the end of the command line
    env: dict[str, str]
    stdout: int | None  # None: that of this process
    stderr: int
    passed_fds: Sequence[int]
    cpus: frozenset[int] | None  # None: those of this process


class RankPopen(Popen):
    """The process of one rank. `pid` is also the number of its process group.

    Any thread may call the methods of multiprocessing (`poll`, `wait`, `terminate`, `kill`, `close`), but only the watcher
    thread `reap`, `abandon` and `read_exit_code`.
    """

    pid: int
    returncode: int | None

    @classmethod
    def start(cls, launch_info: LaunchInfo, name: str, surroundings: Surroundings) -> Self:
        """Start a rank. `launch_info` is what it reads first. Raises OSError or RuntimeError."""
        process = RankProcess(launch_info, RANK_PROGRAM, name=name, start_method=get_start_method(allow_none=True))
        popen = cls(process, surroundings)
        # As Process.start does, which refuses it in a daemonic process. The watcher keeps the RankPopen, because the calling
        # program may close any Process that multiprocessing.active_children() returns.
        vars(process).update(_popen=popen, _sentinel=popen.sentinel)
        mp_process._children.add(process)
        return popen

    def __init__(self, process: RankProcess, surroundings: Surroundings) -> None:
        self.name = process.name
        self._process: RankProcess | None = process
        self._surroundings = surroundings
        self._lock = threading.Lock()
        self._is_reaped = False
        self._is_exit_code_known = True
        self._exit_thread: threading.Thread | None = None
        super().__init__(process)  # calls `_launch`

    def _launch(self, process: RankProcess) -> None:
        tracker_fd: Any = resource_tracker.getfd()
        around = self._surroundings
        data = self._pickle(process)
        with ExitStack() as stack:
            child_r, parent_w = os.pipe()
            stack.callback(os.close, parent_w)
            try:
                _fill_pipe(parent_w, data)
                command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r)
                if not getattr(sys, "frozen", False):  # there multiprocessing reads all arguments (freeze_support)
                    # Without -P, a signal.py in the current folder would run instead of Python's own module.
                    command = [command[0], "-P", *command[1:], *around.description]
                fds = [child_r, tracker_fd, *around.passed_fds]
                with limit_thread_to(around.cpus):  # the rank inherits it, so its interpreter is bound from the start
                    self.pid = start_process(
                        command, around.env, fds, stdout=around.stdout, stderr=around.stderr, leads_group=True
                    )
            finally:
                os.close(child_r)
            stack.callback(os.waitpid, self.pid, 0)
            stack.callback(os.kill, self.pid, signal.SIGKILL)
            pidfd = open_pidfd(self.pid)
            self.sentinel = self._start_exit_thread() if pidfd is None else pidfd
            # The pipe to the child stays open, because parent_process() in the child watches it.
            self.finalizer = mp_util.Finalize(self, mp_util.close_fds, {parent_w, self.sentinel})
            stack.pop_all()

    def _start_exit_thread(self) -> int:
        """Return a descriptor that becomes readable when the rank has ended."""
        ours, theirs = socket.socketpair()
        self._exit_thread = threading.Thread(target=self._shut_down_at_exit, args=[theirs], name="mpwatch exit", daemon=True)
        try:
            self._exit_thread.start()
        except BaseException:
            ours.close()
            theirs.close()
            raise
        return ours.detach()

    def _pickle(self, process: RankProcess) -> bytes:
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            pickle.dump(_make_preparation_data(process), data)
            reduction.dump(process, data)
        finally:
            set_spawning_popen(None)
        return data.getvalue()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, UNKNOWN_EXIT if the system has lost it, or None while the rank runs. Does not reap."""
        block = not flag & os.WNOHANG
        if self._exit_thread is None:
            self._store_exit_code(block=block)
        elif block:
            self._exit_thread.join()
        return self.returncode

    def _store_exit_code(self, *, block: bool) -> None:
        if self.returncode is not None:
            return
        try:
            # Without the lock: another thread may join the rank meanwhile, and must not keep the watcher from stopping it.
            code, is_known = peek_exit_code(self.pid, block=block), True
        except ChildProcessError:
            code, is_known = UNKNOWN_EXIT, False
        with self._lock:
            if self.returncode is None:
                self._is_exit_code_known, self.returncode = is_known, code

    def _shut_down_at_exit(self, end: socket.socket) -> None:
        with end:
            self._store_exit_code(block=True)
            end.shutdown(socket.SHUT_RDWR)  # a close would not reach the other end while a fork of this program has a copy

    def read_exit_code(self) -> int | None:
        """Return the exit code of a dead rank. None: SIGCHLD is ignored, or other code or a debugger (ptrace) has it."""
        deadline = monotonic() + STATUS_SECONDS
        while (code := self.poll()) is None and monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return code if self._is_exit_code_known else None

    def wait_for_exit(self, deadline: float) -> bool:
        """Wait until a time of CLOCK_MONOTONIC. Return whether the rank has ended."""
        return bool(wait([self.sentinel], max(0.0, deadline - monotonic())))

    def send_signal_to_group(self, number: int) -> None:
        """Send a signal to the rank, and to all other processes in the rank's process group."""
        with self._lock:
            if not self._is_reaped:
                self._signal_group(number)

    def send_signal(self, number: int) -> None:
        with self._lock, TOLERATE_FAILURE:
            if not self._is_reaped:
                os.kill(self.pid, number)

    def _send_signal(self, sig: int) -> None:  # what terminate() and kill() of a Process call
        self.send_signal_to_group(sig)

    def _signal_group(self, number: int) -> None:
        with TOLERATE_FAILURE:
            os.killpg(self.pid, number)
        with TOLERATE_FAILURE:
            if os.getpgid(self.pid) != self.pid:  # the rank has joined another group
                os.kill(self.pid, number)

    def reap(self) -> None:
        """Kill what is left in the group of a dead rank, and reap the rank, unless a debugger (ptrace) holds it."""
        self.read_exit_code()
        with self._lock:
            if not self._is_reaped:
                self._signal_group(signal.SIGKILL)
                with suppress(ChildProcessError):  # other code has reaped it
                    os.waitpid(self.pid, os.WNOHANG)
                self._is_reaped = True
        if self._exit_thread is not None:
            self._exit_thread.join()
        self._release()

    def abandon(self) -> None:
        """Close the descriptors of a rank that cannot be killed or reaped. Without an exit thread it will be a zombie until
        the program ends.
        """
        with self._lock:
            self._is_reaped = True
        self._release()

    def _release(self) -> None:
        # Not Process.close(): another thread may be in join(), as multiprocessing is when the calling program ends.
        self.close()
        # Process and RankPopen refer to each other. Without this, a program that has switched the garbage collector off
        # would keep both objects, with the environment of each rank.
        process, self._process = self._process, None
        if process is not None:
            mp_process._children.discard(process)

    def close(self) -> None:
        """Those of a running rank stay open, because the watcher waits for it."""
        if self._is_reaped:
            super().close()


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
    original_dir = mp_process.ORIGINAL_DIR
    return {
        "name": process.name,
        "authkey": current_process().authkey,
        "sys_path": [original_dir if entry == "" and original_dir is not None else _resolve(entry) for entry in sys.path],
        "sys_argv": sys.argv,
        "orig_dir": original_dir,
        "dir": os.getcwd(),
        "log_to_stderr": mp_util._log_to_stderr,
        **({} if mp_util._logger is None else {"log_level": mp_util._logger.getEffectiveLevel()}),
    }
