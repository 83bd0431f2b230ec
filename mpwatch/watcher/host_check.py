"""Checks that this process can start and watch ranks, in the caller's thread, before anything is started.

To unpack its call, a rank imports the module of the called function. If this import started ranks, each new rank would
import the module again, and the number of processes would grow without end. A process that multiprocessing has spawned
imports `__main__`, so this import must not start ranks either.
"""

import os
import sys
import threading
from multiprocessing import spawn
from types import FrameType

from mpwatch.errors import LaunchError
from mpwatch.os_support.cpython_private import is_importing_main
from mpwatch.os_support.descriptors import STDERR
from mpwatch.wire.pickling import call_payload

MONKEYS = (("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched"))
GUARD = 'under `if __name__ == "__main__":`'
NEEDED_MODULES = ("threading", "thread", "select", "selectors", "os", "subprocess")


def check_host() -> None:
    """Raise LaunchError, or RuntimeError if the ranks would start ranks. Open /dev/null for closed standard streams."""
    for module, name in MONKEYS:
        is_patched = getattr(sys.modules.get(module), name, None)
        if is_patched is not None and any(map(is_patched, NEEDED_MODULES)):
            raise LaunchError(
                f"{module[: module.index('.')]} has replaced threads, select, os or subprocess here; call mpwatch in a "
                "process without monkey patching (in Celery: a worker with --pool=solo or --pool=threads)"
            )
    executable = os.fsdecode(spawn.get_executable() or "")
    if not os.path.isfile(executable):
        raise LaunchError(
            f"ranks are started with this program's Python interpreter, and {executable!r} is no file; name the interpreter "
            "by multiprocessing.set_executable(...), since a program that embeds Python often has none in sys.executable"
        )
    _check_not_importing()
    for fd in range(STDERR + 1):  # a socket of mpwatch would get the number, and what ranks print
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _check_not_importing() -> None:
    """Raise RuntimeError in a rank that unpacks its call, and in a spawned process that imports `__main__`."""
    if is_importing_main():
        raise RuntimeError(
            "mpwatch was called while __main__ is being imported again, in a process that multiprocessing has spawned (such "
            f"as a DataLoader's worker); put the call {GUARD}"
        )
    if call_payload.is_unpacking(threading.current_thread()):
        module = _find_imported_module(sys._getframe(1))
        if module is None:
            where = "while a rank was loading its own call, or in a thread that was started then"
            remedy = "make the call, and start its thread, in the function that the rank runs"
        else:
            name, path = module.f_globals.get("__name__"), module.f_code.co_filename
            where = f"at the import of module {name}, line {module.f_lineno} ({path}), in a rank"
            remedy = f"put the call into a function, or {GUARD}"
        raise RuntimeError(f"mpwatch was called {where}; the new ranks would do the same, without end; {remedy}")


def _find_imported_module(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not call_payload.unpack.__code__:
        if frame.f_code.co_name == "<module>":
            return frame
        frame = frame.f_back
    return None
