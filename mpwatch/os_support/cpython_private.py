"""Names of CPython's private API that mpwatch uses in the watcher and in the ranks. CPython 3.11 to 3.15 has all of them.

The comments say what each is for, and what breaks without it. These are used elsewhere:

watcher/processes/process.py:
- `multiprocessing.Process._Popen` and `popen_spawn_posix.Popen._launch`, overridden. If `Process.start` does not call them,
  a rank is an ordinary spawned process, with the process group and the environment of its parent.
- `popen_fork.Popen._send_signal`, overridden for `terminate` and `kill`. Else child processes of the rank get no signal.
- `popen_spawn_posix.Popen`, `context.set_spawning_popen`, `reduction.dump`, `resource_tracker.getfd` and
  `spawn.get_command_line`, which look public. Without one of them, no rank can be started.

wire:
- launch.py sets `_start_method` of the rank's Process object, so that the default start method is that of the program.
- pickling/call_payload.py passes an object with `duplicate_for_child` and `DupFd` to `context.set_spawning_popen`: with it
  multiprocessing pickles descriptors. Else no lock, queue or connection can be sent. From 3.14 on, it deletes the rank's own
  `-c` command from `linecache._interactive_cache`: its file name `<string>` is also that of code for `exec`, for which
  tracebacks would quote it.
- pickling/main_module.py replaces `multiprocessing.spawn.get_preparation_data` in a rank. Else processes that a rank spawns
  import the script, which then needs a guard.
- pickling/definitions.py calls `_abc._abc_init`, as ABCMeta does, and pickling/pickler.py `abc._get_dump`. Without them,
  abstract classes of a script cannot be sent. pickler.py passes `co_*` to `types.CodeType` in the order of its parameters.
- exceptions/source_lines.py adds the source of notebook cells to `linecache.cache`, so that tracebacks quote it.
- `co_positions()` has one entry for every two bytes of bytecode: exceptions/tracebacks.py uses the entry `tb_lasti // 2`.
  It assumes that `compile` sets the `co_firstlineno` of a module to 1. Else carets and lines are wrong.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import sys
import threading
from contextlib import suppress
from multiprocessing import process, util

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess
    from typing import Any

# typeshed contains only the public names of these modules.
mp_process: Any = process
mp_util: Any = util

# The module socket replaces these numbers by enums, whose arithmetic runs in Python. The module socket can replace this
# module.
c_socket: Any = _socket

# The module signal converts each number and handler to an enum and back. Its functions can replace these functions.
c_getsignal = _signal.getsignal
c_signal = _signal.signal
c_sigmask = _signal.pthread_sigmask


def get_original_dir() -> str | None:
    # Spawn passes this folder to the child for the "" in sys.path. Without this name, the ranks of a program that has
    # changed its folder since its start find other modules.
    folder: str | None = mp_process.ORIGINAL_DIR
    return folder


def is_importing_main() -> bool:
    """Return whether this process was spawned and is still importing `__main__`."""
    # Without this name, such a process starts ranks when it imports its main module, as its parent has already done.
    return bool(getattr(mp_process.current_process(), "_inheriting", False))


def get_logging_setup() -> dict[str, Any]:
    """Return the settings of multiprocessing's logger, which the start method "spawn" passes to a child process."""
    # Without these names `multiprocessing.log_to_stderr()` has no effect in ranks.
    level = {} if mp_util._logger is None else {"log_level": mp_util._logger.getEffectiveLevel()}
    return {"log_to_stderr": mp_util._log_to_stderr, **level}


def get_popen(child: BaseProcess) -> Any:
    # The watcher keeps this object, because the user may close any process in multiprocessing.active_children(). Without
    # this name, keep the object that `_Popen` returns.
    return vars(child)["_popen"]


def forget_child(child: BaseProcess) -> None:
    # Process.close() does the same, but breaks a join() in another thread. Without this name, dead ranks stay in
    # active_children(), and the program waits at its end for a rank that cannot be killed.
    mp_process._children.discard(child)


def get_spawn_reducers() -> dict[type, Any]:
    """Return a dict from each type to the pickling function that multiprocessing or torch has registered for the type."""
    # Without this name, only `copyreg.dispatch_table` is used, and no connection, socket or shared tensor can be in a call.
    from multiprocessing.reduction import ForkingPickler

    pickler: Any = ForkingPickler  # typeshed does not have the attribute
    reducers: dict[type, Any] = pickler._extra_reducers
    return reducers


def make_fds_finalizer(owner: object, fds: set[int]) -> Any:
    """Return a finalizer that closes the descriptors `fds` when it is called, or when `owner` is garbage-collected."""
    # multiprocessing's Popen.close() calls the finalizer. Without this name, use weakref.finalize.
    return mp_util.Finalize(owner, mp_util.close_fds, fds)


def call_before_joining_threads(action: Callable[[], object]) -> None:
    """Call `action` after the script, before Python waits for other threads. Do nothing if the end has begun."""
    # Without this name, a program whose script has ended by Ctrl-C still waits for runs in other threads, until the next
    # Ctrl-C.
    with suppress(RuntimeError):
        threading._register_atexit(action)  # type: ignore[attr-defined]


def exit_by_sigint() -> None:
    """Let SIGINT kill this process when the program ends, as Python does after an uncaught KeyboardInterrupt."""
    # Python notes a KeyboardInterrupt that leaves code made from a string. From 3.14 on it notes only a KeyboardInterrupt
    # that it prints by `sys.excepthook`. Without this behaviour, the exit status is 0, although the program was interrupted.
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")  # noqa: S102  the code is a constant
    if sys.version_info >= (3, 14):
        with suppress(ImportError, KeyboardInterrupt):  # Python was built without ctypes, or another Ctrl-C has come
            import ctypes

            sys.excepthook = lambda *_: None  # nothing else is run or printed in the main thread
            ctypes.pythonapi.PyRun_SimpleString(b"raise KeyboardInterrupt")
