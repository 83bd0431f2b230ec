"""Check that this process can start and watch ranks. This module runs in the caller's thread, before anything is started."""

import os
import signal
import sys
import threading
from contextlib import suppress
from logging import WARNING
from multiprocessing import spawn

from mpwatch.errors import LaunchError
from mpwatch.os_support.hardware import read_available_memory
from mpwatch.os_support.signals import set_handler
from mpwatch.watcher.observers.deferred_log import log_now

MONKEYS = (("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched"))
INTERPRETER_BYTES = 8_000_000  # private memory of a rank that has imported nothing (Python 3.11 to 3.13)
NEEDED_MODULES = ("threading", "thread", "select", "selectors", "os", "subprocess")


def check_host() -> None:
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
    if threading.current_thread() is threading.main_thread():
        try:
            with suppress(OSError):  # the kernel refuses it, but a subinterpreter refuses it first
                set_handler(signal.SIGKILL, signal.SIG_DFL)
        except ValueError:
            raise LaunchError(
                "mpwatch was called in the main thread of a subinterpreter, where no signal can be handled; call it in the "
                "main interpreter, or in another thread of the subinterpreter"
            ) from None


def warn_of_memory(nprocs: int) -> None:
    needed, available = nprocs * INTERPRETER_BYTES, read_available_memory()
    if available is not None and needed > available:
        log_now(
            WARNING,
            "%d ranks need about %.0f GB of memory even before they import anything, and %.0f GB are free",
            nprocs,
            needed / 1e9,
            available / 1e9,
        )
