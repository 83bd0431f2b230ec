"""Check that this process can start and watch ranks. This module runs in the caller's thread, before anything is started."""

import os
import sys
from multiprocessing import spawn

from mpwatch.errors import LaunchError

MONKEYS = (("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched"))
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
