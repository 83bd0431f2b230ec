"""Recognise errors that report a shortage, for example of memory or of descriptors.

`with_remedy` adds advice to an error text, such as "raise the limit of open files".

This module runs in the watcher and in the ranks.
"""

import errno
import os

REMEDIES: dict[int | None, str] = {
    errno.EMFILE: "raise the limit of open files (`ulimit -n`): a rank takes about 4 descriptors, with `logs` up to 8",
    errno.ENFILE: "the system has no more open files: see /proc/sys/fs/file-max",
    errno.EAGAIN: "raise the limit of processes (`ulimit -u`, or pids.max of the container)",
    errno.ENOMEM: "free some memory, or start fewer ranks",
    errno.ENOSPC: "free some space on the disk that holds the temporary files",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`), which also limits shared memory",
    errno.E2BIG: "the environment is too large for a new process: see `env`",
    errno.ENOENT: "check that the current folder of this program and its Python interpreter still exist",
    errno.ENOEXEC: "name the Python interpreter of the ranks by multiprocessing.set_executable(...)",
    errno.ELOOP: "remove the symbolic link, which is not followed here",
    errno.ENXIO: "remove it: a FIFO or a device cannot take the place of a regular file",
    errno.ETOOMANYREFS: "raise the limit of open files (`ulimit -n`), or use torch's sharing strategy 'file_system'",
}
SHORTAGE_ERRNOS = frozenset((errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EFBIG))
NO_THREAD = "can't start new thread"  # the text of the RuntimeError of threading
# torch raises a RuntimeError with one of these texts.
SHORTAGE_TEXTS = tuple(os.strerror(number) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC))


def is_resource_shortage(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in SHORTAGE_ERRNOS
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in SHORTAGE_TEXTS)
    )


def with_remedy(what: str, error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"{what}: there is not enough memory; free some, or let each rank load large data itself"
    number = error.errno if isinstance(error, OSError) else errno.EAGAIN if str(error) == NO_THREAD else None
    remedy = f"; {REMEDIES[number]}" if number in REMEDIES else ""
    return f"{what}: {type(error).__name__}: {error}{remedy}"
