"""Pickle a call once for all ranks, and load it in each rank.

    packed.py:    [ fn, args, kwargs ... ][ part 0 ][ part 1 ]... [ description of __main__ ]
    descriptors:  of the file, if there is one; then of connections and shared tensors in the call

A part belongs to one rank, and has its own value of each PerRank argument. A rank loads no other rank's part.

A rank does not import the caller's `__main__`. The functions and classes of `__main__` that the call uses travel with it
(definitions.py).
"""

from __future__ import annotations

import errno
import os
import threading
from weakref import WeakSet

from mpwatch.wire.pickling import main_module
from mpwatch.wire.pickling.packed import Packed, Unpacked, map_packed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Self

# Bytes. A call up to this size is sent over the channel itself. The send must not block, and some systems' sockets hold 8
# KiB.
MAX_INLINE_SIZE = 7 << 10


class FunctionCall:
    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        backend: str | None,
        process_group_version: int | None = None,
        *,
        backend_timeout: float | None = None,
        parts: Sequence[Mapping[int | str, Any]] = (),
    ) -> None:
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.backend = backend  # the backend of the process group that exists while fn runs. None means no process group
        self.backend_timeout = backend_timeout  # seconds for each collective of that group. None means torch's default
        # A rank keeps its process group for the next call of the same version. If it is None, the group is for this call
        # only.
        self.process_group_version = process_group_version
        # For each rank the arguments that differ from rank to rank, by position or name. In `args` and `kwargs` they are
        # None.
        self.parts = parts


class Payload(Packed):
    """A packed call, with duplicates of the descriptors in its arguments: the caller can close the originals before the last
    rank has started. Close it when no rank needs it any more.
    """

    def __init__(self) -> None:
        self._duplicates: list[int] = []
        super().__init__("mpwatch-call", MAX_INLINE_SIZE)

    @property
    def fds(self) -> list[int]:
        return [*([] if self.file is None else [self.file.fileno()]), *self._duplicates]

    def duplicate_fd(self, fd: int) -> int:
        self._duplicates.append(os.dup(fd))
        return len(self._duplicates) - 1

    def close(self) -> None:
        while self._duplicates:
            os.close(self._duplicates.pop())
        super().close()

    __del__ = close


class FdPlaceholder:
    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        """In the rank: return a duplicate of the descriptor. The caller of `detach` must close the duplicate."""
        return os.dup(_received_fds[self.index])


# All of these are for a rank.
_received_fds: list[int] = []  # during `unpack`: the descriptors of placeholders
_earlier_threads: list[threading.Thread] | None = None  # during `unpack`: the threads that existed before
_threads_of_imports: WeakSet[threading.Thread] = WeakSet()  # the threads that were started during `unpack`


class SpawnPopenStub:
    """Imitates the Popen object of multiprocessing, since locks, queues, connections and tensors in shared memory can be
    pickled only while a process is spawned (see os_support/cpython_private.py).
    """

    DupFd = FdPlaceholder

    def __init__(self, duplicate_fd: Callable[[int], int]) -> None:
        self.duplicate_for_child = duplicate_fd

    def __enter__(self) -> Self:
        from multiprocessing import context

        set_spawning_popen: Any = context.set_spawning_popen
        set_spawning_popen(self)  # for this thread only
        return self

    def __exit__(self, *_: object) -> None:
        from multiprocessing.context import set_spawning_popen

        set_spawning_popen(None)


def pack(call: FunctionCall) -> Payload:
    """Pickle a call. Raises OSError, and every exception that pickling raises."""
    from mpwatch.wire.pickling.pickler import Pickler  # not at the top: a rank may not need cloudpickle

    payload = Payload()
    try:
        with SpawnPopenStub(payload.duplicate_fd):
            pickler = Pickler(payload, payload.keep, is_call=True)
            about = (call.fn, call.args, call.kwargs, call.backend, call.process_group_version, call.backend_timeout)
            for content in (about, *call.parts):
                pickler.dump(content)
                payload.end_pickle()
                pickler.clear_memo()
            pickler.dump(main_module.describe(pickler.modules))
            payload.end_pickle()
        return payload.finish()
    except BaseException:
        payload.close()
        raise


def unpack(body: bytes, fds: list[int] | None, choose_part: Callable[[int], int]) -> FunctionCall:
    """In a rank: load a call, and close its descriptors. Raises OSError, and what user code raises.

    `fds` is None if the rank could not receive the descriptors. `choose_part` returns the index of this rank's part.
    """
    if fds is None:
        raise OSError(errno.EMFILE, "the descriptors of the call could not be taken in; see `ulimit -n`")
    global _earlier_threads
    _earlier_threads = threading.enumerate()
    try:
        _received_fds[:] = fds if body else fds[1:]
        unpacked = Unpacked(body or map_packed(fds[0]))
        main_module.set_up(unpacked.load())
        fn, args, kwargs, backend, process_group_version, backend_timeout = unpacked.load(0)
        if number_of_parts := len(unpacked) - 2:
            args = list(args)
            for key, value in unpacked.load(1 + choose_part(number_of_parts)).items():
                (args if isinstance(key, int) else kwargs)[key] = value
        return FunctionCall(fn, args, kwargs, backend, process_group_version, backend_timeout=backend_timeout)
    finally:
        _threads_of_imports.update(thread for thread in threading.enumerate() if thread not in _earlier_threads)
        _earlier_threads = None
        _received_fds.clear()
        for fd in fds:
            os.close(fd)


def is_unpacking(thread: threading.Thread) -> bool:
    """Return whether this thread of a rank loads a call, or was started meanwhile, for example by an imported module."""
    if thread in _threads_of_imports:
        return True
    return _earlier_threads is not None and (thread is threading.main_thread() or thread not in _earlier_threads)
