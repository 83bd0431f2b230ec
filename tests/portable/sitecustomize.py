"""Takes away what only Linux has, so that mpwatch goes its portable ways: `tox run -e portable` puts this on the path.

Python imports this module at its start, in the tests and in the ranks. The kernel is still Linux, and `sys.platform` is
"linux", so this does not show how another kernel behaves.
"""

import _socket
import fcntl
import os
import signal
import sys

LINUX_ONLY = {
    os: ("pidfd_open", "memfd_create", "waitid", "sched_setaffinity"),
    fcntl: ("F_SETSIG", "F_GETPIPE_SZ", "F_SETPIPE_SZ"),
    signal: ("SIGRTMIN", "SIGRTMAX"),
    _socket: ("MSG_CMSG_CLOEXEC",),
}


def refuse_files_of_linux(event, args):
    """Hide /proc and /sys from mpwatch's own code. The tests and other packages may read them."""
    if event not in ("open", "os.listdir") or not isinstance(args[0], str):
        return
    if args[0].startswith(("/proc/", "/sys/")) and sys._getframe(1).f_globals.get("__name__", "").startswith("mpwatch"):
        raise FileNotFoundError(2, "hidden by tests/portable", args[0])


if sys.platform == "linux":
    for module, names in LINUX_ONLY.items():
        for name in names:
            delattr(module, name)
    signal.SIGINFO, signal.SIGEMT = signal.SIGPWR, signal.SIGSTKFLT  # which few programs use
    sys.addaudithook(refuse_files_of_linux)
