"""One rank's process, as the watcher holds it: start, sentinel, signals, burial.

A multiprocessing.Process of the spawn context in all that a caller can see, started with three differences:

- `__main__` is not imported again in the child, and asking for the start method does not fix the host's;
- the child is the leader of a process group of its own from before its first instruction, so that what it starts can be
  stopped with it, and it has its environment, an empty stdin and a stderr of its own from then on too;
- its sentinel is a pidfd where there are such. Spawn's own is a pipe that any forked grandchild keeps open.

Overrides private methods of multiprocessing: `Process._Popen`, `Popen._launch` and `Popen._send_signal`. The docstring of
os_support/cpython_private.py says what breaks if they go.

Guarantee: a rank stays a zombie, so that its number is nobody else's, until its group has been killed; then it is reaped.
"""

import errno
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing import current_process, get_start_method, reduction, resource_tracker, spawn
from multiprocessing.connection import wait
from multiprocessing.context import set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from typing import Any

from mpwatch.os_support.cpython_private import (
    check_not_importing_main,
    fds_finalizer,
    forget_child,
    logging_of_multiprocessing,
    original_dir,
    popen_of,
    reap_later,
)
from mpwatch.os_support.descriptors import grow_pipe
from mpwatch.os_support.processes import open_pidfd, peek_exit
from mpwatch.wire.launch import LaunchInfo, RankProcess

RANK_PROGRAM = "mpwatch.worker.main"  # what runs in a rank; the watcher never imports it
PIPE_SIZE = 1 << 16  # what a pipe holds where the system does not say
UNKNOWN_EXIT = 255  # the exit code of a child whose status somebody else has taken
TRACER_SECONDS = 0.05  # a debugger that is awake has taken note of a death in less


class WatchedProcess(RankProcess):
    """The watcher's side of a rank's process; the child gets a plain RankProcess."""

    def __init__(
        self,
        launch_info: LaunchInfo,
        env: dict[str, str],
        passed_fds: list[int],
        output_fds: tuple[int | None, int],
        name: str,
    ) -> None:
        super().__init__(launch_info, RANK_PROGRAM, name=name, start_method=get_start_method(allow_none=True))
        self.env = env
        self.passed_fds = passed_fds
        self.output_fds = output_fds  # its stdout and stderr; None: those of this program

    @staticmethod
    def _Popen(process_obj: Any) -> "_RankPopen":  # noqa: N802  multiprocessing's name for it
        return _RankPopen(process_obj)

    def __reduce__(self) -> Any:
        state = {name: value for name, value in vars(self).items() if name not in ("env", "passed_fds", "output_fds")}
        return RankProcess.__new__, (RankProcess,), state

    def start(self) -> None:
        """Start the rank. Raises OSError, RuntimeError, AssertionError."""
        super().start()
        # Ours, whatever a stranger does with the Process that multiprocessing.active_children() shows to everybody.
        self.child: _RankPopen = popen_of(self)
        self.child_pid = self.child.pid

    def poll(self) -> int | None:
        """The exit code, now that it has ended, as multiprocessing has it; UNKNOWN_EXIT if it was lost, see `exit_is_known`.

        None if a debugger holds it: the kernel tells that one first, and the parent when it has taken note.
        """
        until = time.monotonic() + TRACER_SECONDS
        while (code := self.child.poll()) is None and time.monotonic() < until:
            time.sleep(0.001)
        return code

    def has_ended_by(self, deadline: float) -> bool:
        """Whether it ends by that time of CLOCK_MONOTONIC."""
        try:
            return bool(wait([self.child.sentinel], max(0.0, deadline - time.monotonic())))
        except OSError:  # so short of memory, or with so low a limit of open files, that nothing can be waited for
            while (code := self.child.poll()) is None and time.monotonic() < deadline:
                time.sleep(0.001)
            return code is not None

    def signal_group(self, number: int) -> None:
        """Send a signal to the rank and whatever it has started in its process group."""
        self.child.signal_group(number)

    def signal_rank(self, number: int) -> None:
        """Send a signal to the rank alone: an interrupt, since it decides what that means to what it has started."""
        self.child.signal_rank(number)

    def exit_is_known(self) -> bool:
        """False if the status was lost: SIGCHLD is ignored in this program, or another part of it waits for any child."""
        return self.child.status_known

    def reap(self) -> bool:
        """Once it has ended: kill what is left of its group, reap it, close what is open. False if a debugger holds it, so
        that it cannot be reaped yet.

        Not `close()`: another thread may be waiting for it in `join()`, as multiprocessing does at the program's end.
        """
        if not self.child.reap():
            return False
        self.child.close()
        forget_child(self)
        return True

    def abandon(self) -> None:
        """It cannot be killed, or not be reaped. The end of the program, which joins all children, must not wait for it."""
        self.child.abandon()
        self.child.close()
        forget_child(self)


class _RankPopen(Popen):
    """What Process does its work with. `poll` may be called by any thread that starts another process."""

    pid: int
    returncode: int | None

    def __init__(self, process_obj: WatchedProcess) -> None:
        self._lock = threading.Lock()
        self._is_reaped = False
        self.status_known = True
        super().__init__(process_obj)

    def _launch(self, process_obj: WatchedProcess) -> None:
        tracker_fd = _resource_tracker_fd()
        data = self._pickle(process_obj)
        with ExitStack() as stack:
            child_r, parent_w = os.pipe()
            stack.callback(os.close, parent_w)
            stdout, stderr = process_obj.output_fds
            try:
                _fill(parent_w, data)
                self._child = subprocess.Popen(
                    spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_r),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=process_obj.env,
                    pass_fds=[child_r, tracker_fd, *process_obj.passed_fds],
                    process_group=0,
                )
            finally:
                os.close(child_r)
            stack.callback(self._child.wait)
            stack.callback(self._child.kill)
            self.pid = self._child.pid
            pidfd = open_pidfd(self.pid)
            if pidfd is not None:
                stack.callback(os.close, pidfd)
            # The child's parent_process() watches the pipe, so it stays open; its reader's end is also a sentinel.
            self.sentinel = parent_w if pidfd is None else pidfd
            self.finalizer = fds_finalizer(self, {parent_w, self.sentinel})
            stack.pop_all()

    def _pickle(self, process_obj: WatchedProcess) -> bytes:
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            pickle.dump(_preparation_data(process_obj), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        return data.getvalue()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code once the rank has ended. It is looked at, not taken: see `bury`."""
        if self.returncode is not None:
            return self.returncode
        try:
            # without the lock: another thread may join the process, and must not keep us from stopping it
            code, known = peek_exit(self.pid, block=not flag & os.WNOHANG), True
        except ChildProcessError:
            code, known = UNKNOWN_EXIT, False
        with self._lock:
            if self.returncode is None:
                self.returncode, self.status_known = code, known
            return self.returncode

    def signal_group(self, number: int) -> None:
        with self._lock:
            if not self._is_reaped:
                _signal_group(self.pid, number)

    def signal_rank(self, number: int) -> None:
        with self._lock, suppress(ProcessLookupError, PermissionError):
            if not self._is_reaped:
                os.kill(self.pid, number)

    def _send_signal(self, sig: int) -> None:  # what terminate() and kill() of a Process do
        self.signal_group(sig)

    def close(self) -> None:
        if self._is_reaped:  # until then its descriptors are waited on
            super().close()

    def reap(self) -> bool:
        with self._lock:
            if self._is_reaped:
                return True
            _signal_group(self.pid, signal.SIGKILL)
            try:
                ended, status = self._reap()
                if not ended:
                    return False
                self.returncode = os.waitstatus_to_exitcode(status)
            except ChildProcessError:
                self.returncode = UNKNOWN_EXIT if self.returncode is None else self.returncode
            self._is_reaped = True
            self._child.returncode = self.returncode  # else subprocess would wait for it, too
            return True

    def _reap(self) -> tuple[int, int]:
        """At once as a rule: it has ended. Not if it is traced, or if its sentinel is no pidfd."""
        until = time.monotonic() + TRACER_SECONDS
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.001)
        return ended

    def abandon(self) -> None:
        """Leave it to subprocess, which reaps whoever was left to it each time that it starts a process."""
        with self._lock:
            if not self._is_reaped:
                self._is_reaped = True
                reap_later(self._child)


def _fill(pipe: int, data: bytes) -> None:
    """All of it, before there is a reader: who writes later waits for the child, or for ever if it dies meanwhile."""
    os.set_blocking(pipe, False)
    room = grow_pipe(pipe, len(data)) or PIPE_SIZE
    if room < len(data) or os.write(pipe, data) < len(data):
        raise OSError(
            errno.EMSGSIZE,
            f"sys.argv and sys.path take {len(data)} bytes, and a pipe holds {room} here; shorten them, or see "
            "/proc/sys/fs/pipe-max-size and pipe-user-pages-soft",
        )
    os.set_blocking(pipe, True)


def _signal_group(pid: int, number: int) -> None:
    # PermissionError: nobody in it may be signalled by us, such as a setuid helper
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) != pid:  # it has gone to another group
            os.kill(pid, number)


def _resource_tracker_fd() -> Any:
    """The host's resource tracker, started by its first user. Starting it would unblock signals in this thread."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        return resource_tracker.getfd()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _preparation_data(rank: WatchedProcess) -> dict[str, Any]:
    """What spawn tells a child before anything else, without the import of `__main__` and without the start method.

    Raises RuntimeError in a process that is itself still being spawned, as spawn does.
    """
    check_not_importing_main()
    here = original_dir()
    return {
        "name": rank.name,
        "authkey": current_process().authkey,
        "sys_path": [here if entry == "" and here is not None else entry for entry in sys.path],
        "sys_argv": sys.argv,
        "orig_dir": here,
        "dir": os.getcwd(),
        **logging_of_multiprocessing(),
    }
