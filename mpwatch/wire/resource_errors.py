"""What can be done when this program or its machine is short of something, by the error in which the system said so."""

import errno
import os

REMEDIES: dict[int | None, str] = {
    errno.EMFILE: "raise the limit of open files (`ulimit -n`): a rank takes about 4 descriptors, with `logs` up to 8",
    errno.ENFILE: "the system has no more open files: see /proc/sys/fs/file-max",
    errno.EAGAIN: "raise the limit of processes (`ulimit -u`, or pids.max of the container)",
    errno.ENOMEM: "free some memory, or start fewer ranks",
    errno.ENOSPC: "free some space where temporary files are",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`), which counts for memory that processes share, too",
    errno.E2BIG: "the environment is too large for a new process: see `env`",
    errno.ENOENT: "does the folder that this program runs in, and its Python, still exist?",
    errno.ETOOMANYREFS: "raise the limit of open files (`ulimit -n`), or torch's sharing strategy 'file_system'",
}
SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EFBIG))
# What torch says of them, in a RuntimeError
WORDS = tuple(os.strerror(number) for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC))


def is_shortage(error: BaseException) -> bool:
    """Whether this was raised because something has run out, and not because of what was done with it."""
    if isinstance(error, OSError):
        return error.errno in SHORTAGES
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS))


def with_remedy(what: str, error: BaseException) -> str:
    """What could not be done, why, and what helps against that if it is known."""
    if isinstance(error, MemoryError):
        return f"{what}: there is not enough memory; free some, or have the ranks load by themselves what is large"
    number = error.errno if isinstance(error, OSError) else None
    remedy = f"; {REMEDIES[number]}" if number in REMEDIES else ""
    return f"{what}: {type(error).__name__}: {error}{remedy}"
