"""Functions after which their rank can import nothing more. The rank imports this module, so it imports little itself."""

import os
import resource
import sys
from contextlib import suppress


def forget_all_modules(_):
    sys.path.clear()
    sys.meta_path.clear()


def leave_the_root_folder(folder):
    os.chroot(folder)
    os.chdir("/")
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


def use_up_descriptors(_):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with suppress(OSError):
        while True:
            os.open("/", os.O_RDONLY)


def return_value(sabotage, value):
    sabotage()
    return value


def raise_with_cause(sabotage):
    sabotage()
    try:
        raise OSError(7, "the cause")
    except OSError as error:
        raise ValueError("step", 7) from error


def return_lock(sabotage):
    import threading

    sabotage()
    return [threading.Lock()]
