"""Functions after which their rank can import nothing more. The rank imports this module, so it imports little itself."""

import os
import sys


def forget_all_modules(_):
    sys.path.clear()
    sys.meta_path.clear()


def leave_the_root_folder(folder):
    os.chroot(folder)
    os.chdir("/")
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


def return_value(sabotage, value):
    sabotage()
    return value


def raise_with_cause(sabotage):
    sabotage()
    try:
        raise OSError(7, "the cause")
    except OSError as error:
        raise ValueError("step", 7) from error
