"""Names of CPython's private API that mpwatch uses, and what breaks without them. CPython 3.11 to 3.15 has all of them.

watcher/processes/process.py:
- `popen_spawn_posix.Popen._launch`, overridden. If the constructor does not call it, no rank can be started.
- `popen_fork.Popen._send_signal`, overridden for `terminate` and `kill`. Else child processes of the rank get no signal.
- `popen_spawn_posix.Popen`, `context.set_spawning_popen`, `reduction.dump`, `resource_tracker.getfd` and
  `spawn.get_command_line`, which look public. Without one of them, no rank can be started.
- `Process._popen`, `Process._sentinel` and `process._children`: `Process.start` sets them too, but refuses to do it in a
  daemonic process. Else `active_children()` does not list the ranks, and their Process objects are as before a start.
- `process._children`: `Process.close` also forgets the child, but breaks a `join` in another thread. Else dead ranks stay in
  `active_children()`, and the program waits at its end for a rank that cannot be killed.
- `process.ORIGINAL_DIR`, which spawn passes to the child for the "" in sys.path. Else the ranks of a program that has left
  its first folder find other modules.
- `util._log_to_stderr` and `util._logger`. Else `multiprocessing.log_to_stderr()` has no effect in ranks.
- `util.Finalize` and `util.close_fds`, for what `Popen.close` calls. Else use weakref.finalize.

os_support: the modules `_signal` and `_socket`. `signal` and `socket` make enums of all numbers and handlers.

wire:
- launch.py sets `_start_method` of the rank's Process object, so that the default start method is that of the program.
- pickling/call_payload.py passes an object with `duplicate_for_child` and `DupFd` to `context.set_spawning_popen`: with it
  multiprocessing pickles descriptors. Else no lock, queue or connection can be sent.
- pickling/reducers.py reads `ForkingPickler._extra_reducers`. Else no connection, socket or shared tensor can be in a call.
- pickling/main_module.py replaces `multiprocessing.spawn.get_preparation_data` in a rank. Else processes that a rank spawns
  import the script, which then needs a guard.
- pickling/definitions.py calls `_abc._abc_init`, as ABCMeta does, and pickling/pickler.py `abc._get_dump`. Without them,
  abstract classes of a script cannot be sent. pickler.py passes `co_*` to `types.CodeType` in the order of its parameters.
- exceptions/source_lines.py adds the source of notebook cells to `linecache.cache`, so that tracebacks quote it.
- `co_positions()` has one entry for every two bytes of bytecode: exceptions/tracebacks.py uses the entry `tb_lasti // 2`.
  It assumes that `compile` sets the `co_firstlineno` of a module to 1. Else carets and lines are wrong.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import current_process


def is_importing_main() -> bool:
    """Return whether this process was spawned and is still importing `__main__`."""
    # Without this name, such a process starts ranks when it imports its main module, as its parent has already done.
    return bool(getattr(current_process(), "_inheriting", False))


def call_before_joining_threads(action: Callable[[], object]) -> None:
    """Call `action` after the script, before Python waits for other threads. Do nothing if the end has begun."""
    # Without this name, a program whose script has ended by Ctrl-C still waits for runs in other threads, until the next
    # Ctrl-C.
    with suppress(RuntimeError):
        threading._register_atexit(action)  # type: ignore[attr-defined]
