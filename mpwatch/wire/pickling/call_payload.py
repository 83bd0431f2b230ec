"""Pickle a call once for all ranks, and unpickle it in each rank.

    bundle:       [ description of __main__ ][ section: fn, args, kwargs, ... ][ section: part 0 ][ section: part 1 ]...
    section:      [ object ][ definitions for __main__ ]...[ {} ][ sources ]
    descriptors:  of the bundle's file, if it has one (pickle_buffers.py); then of connections and shared tensors in the call

The first section of a bundle contains the function, and the arguments that are the same for all ranks. Each section after
the first section is called a part, and belongs to one rank. A part contains the rank's own value of each PerRank argument.
A rank loads only the first section and its own part, so a part can refer to the first section, but never to another part.

A rank does not import the caller's `__main__`, so the bundle contains the code of the functions and classes of `__main__`
that the call uses (pickler.py). The rank adds these functions and classes to its own `__main__`, so that plain pickle,
torch.save and DataLoader workers find them by name. The rank's `__main__` also contains the global variables that these
functions use.

The import of cloudpickle takes 25 ms, which is longer than everything else that the watcher does for a call. `PlainPickler`
does not import cloudpickle, so `pack` usually tries `PlainPickler` first. If `PlainPickler` fails, `CallPickler`
(pickler.py) pickles the call. For example, `PlainPickler` cannot pickle a function of `__main__`.
"""

from __future__ import annotations

import copyreg
import errno
import os
import pickle
import sys
import threading
from weakref import WeakSet

from mpwatch.wire.pickling.pickle_buffers import (
    VIEW_REDUCERS,
    LazyReducers,
    NullBundle,
    OpenBundle,
    PickleBundle,
    map_bundle,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Self

# Bytes. A call up to this size is sent over the channel itself. The send must not block, and some systems' sockets hold 8
# KiB.
MAX_INLINE_SIZE = 7 << 10
EMPTY_PICKLE = b"\x80\x05}."  # of {}, without an entry in the memo


class Call:
    """A function call for a rank."""

    __slots__ = ("args", "backend", "backend_timeout", "fn", "kwargs", "parts", "process_group_version")

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


class Payload:
    """A pickled call. A payload owns the bundle of the call, and the duplicates of the descriptors in the arguments.

    Call `close` when no rank needs the payload any more. A payload is also closed when it is garbage-collected.
    """

    def __init__(self, bundle: PickleBundle) -> None:
        self._fds: list[int] = []
        self._bundle = bundle

    @property
    def body(self) -> bytes:
        """The bytes of the bundle, or b"" if the bundle is in a file."""
        return self._bundle.body

    @property
    def fds(self) -> list[int]:
        """The file descriptors that a rank needs to unpickle the function and its arguments."""
        file = self._bundle.file
        return [*([] if file is None else [file.fileno()]), *self._fds]

    def duplicate_fd(self, fd: int) -> int:
        """Duplicate this descriptor for the ranks, and return the index of the duplicate in the list `_fds`.

        A duplicate is necessary, because the caller can close the original descriptor before the last rank has started.
        """
        self._fds.extend(map(os.dup, [fd]))  # one call of C code, in which no signal handler can run and leak the descriptor
        return len(self._fds) - 1

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
        self._bundle.close()

    __del__ = close


class FdPlaceholder:
    """Replaces a descriptor in the pickled arguments of a call."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        """In the rank: return a duplicate of the descriptor. The caller of `detach` must close the duplicate."""
        return os.dup(_received_fds[self.index])


# In a rank, these are the functions and classes that came from the caller's `__main__`, by name.
caller_definitions: dict[str, object] = {}
_main_description: tuple[dict[str, Any], bytes] = ({}, b"")  # the last description of `__main__`, with its pickle
_received_fds: list[int] = []  # in a rank, during `unpack`: the descriptors of placeholders
# In a rank, while a call is unpacked, these are the threads that existed before.
_earlier_threads: list[threading.Thread] | None = None
_threads_of_imports: WeakSet[threading.Thread] = WeakSet()  # the threads that were started while a call was unpacked


class _SpawnPopenStub:
    """Imitates the Popen object that multiprocessing uses while it spawns a process.

    mpwatch uses a _SpawnPopenStub while it pickles a call. Locks, queues, connections and tensors in shared memory can be
    pickled only while multiprocessing spawns a process. The module os_support/cpython_private.py names the attributes that
    multiprocessing reads from a _SpawnPopenStub.
    """

    DupFd = FdPlaceholder

    def __init__(self, duplicate_fd: Callable[[int], int]) -> None:
        self._duplicate_fd = duplicate_fd

    def __enter__(self) -> Self:
        from multiprocessing import context

        set_spawning_popen: Any = context.set_spawning_popen
        set_spawning_popen(self)  # for this thread only
        return self

    def __exit__(self, *_: object) -> None:
        from multiprocessing.context import set_spawning_popen

        set_spawning_popen(None)

    def duplicate_for_child(self, fd: int) -> int:
        return self._duplicate_fd(fd)


def pack(call: Call) -> Payload:
    """Pickle a call. Raises OSError, and every exception that pickling raises."""
    if _can_try_plain_pickler(call.fn):
        try:
            return _pack(call, _dump_plain)
        except (OSError, MemoryError):
            raise
        except Exception:  # noqa: BLE001, S110  the call uses __main__, or _dump_with_main raises the right exception
            pass
    return _pack(call, _dump_with_main)


def _pack(call: Call, dump: Callable[[Call, PickleBundle], None]) -> Payload:
    bundle = PickleBundle("mpwatch-call", MAX_INLINE_SIZE)
    payload = Payload(bundle)
    try:
        with _SpawnPopenStub(payload.duplicate_fd):
            bundle.write(_pickle_main_description(sys.modules["__main__"]))
            dump(call, bundle)
        bundle.finish()
    except BaseException:
        payload.close()
        raise
    return payload


def probe(obj: object) -> None:
    """Pickle an object as `pack` does, only to find out whether pickling works. Raises what pickling raises."""
    from mpwatch.wire.pickling.pickler import CallPickler

    with _SpawnPopenStub(lambda _: 0):
        CallPickler(NullBundle(), sys.modules["__main__"]).dump(obj)


class PlainPickler(pickle.Pickler):
    """Pickles functions and classes by name, and raises an exception if one of them is defined in `__main__`.

    Args:
        bundle: the bundle that receives the pickle.
    """

    def __init__(self, bundle: PickleBundle | NullBundle) -> None:
        self.dispatch_table = LazyReducers(_collect_reducers)  # set before __init__, in which the C pickler reads it
        super().__init__(bundle, 5, buffer_callback=bundle.keep_buffer)

    def reducer_override(self, obj: Any) -> Any:
        """Raise PicklingError if an object or its class is defined in `__main__`."""
        if getattr(obj, "__module__", None) == "__main__":
            # The text is never shown. It has no repr of the object, because a repr can run user code.
            raise pickle.PicklingError("of __main__")
        return NotImplemented


def _collect_reducers() -> dict[type, Any]:
    from mpwatch.wire.pickling.per_rank import PerRank, refuse_per_rank
    from mpwatch.wire.pickling.reducers import multiprocessing_reducers, torch_reducers

    return {
        **multiprocessing_reducers(),
        **copyreg.dispatch_table,
        **VIEW_REDUCERS,
        **torch_reducers(),
        PerRank: refuse_per_rank,
    }


def _can_try_plain_pickler(fn: object) -> bool:
    """Return whether `pack` tries `PlainPickler` for a call of this function.

    Return False if the user has registered modules with cloudpickle's `register_pickle_by_value`, because `PlainPickler`
    would ignore the registration.
    """
    if getattr(fn, "__module__", None) == "__main__":
        return False
    cloudpickle = sys.modules.get("cloudpickle")
    if cloudpickle is None:
        return True
    get_modules = getattr(cloudpickle, "list_registry_pickle_by_value", None)
    return get_modules is not None and not get_modules()  # None: another thread is just importing cloudpickle


def _dump_plain(call: Call, bundle: PickleBundle) -> None:
    pickler = PlainPickler(bundle)

    def dump_section(content: object) -> None:
        pickler.dump(content)
        bundle.write(EMPTY_PICKLE + EMPTY_PICKLE)

    _dump_sections(call, bundle, pickler, dump_section)


def _dump_with_main(call: Call, bundle: PickleBundle) -> None:
    from mpwatch.wire.exceptions import source_lines  # not at the top: a rank needs these modules only in rare cases
    from mpwatch.wire.pickling.pickler import CallPickler

    pickler = CallPickler(bundle, sys.modules["__main__"])

    def dump_section(content: object) -> None:
        pickler.main_definitions.clear()
        pickler.codes.clear()
        pickler.dump(content)
        sent: set[str] = set()
        while new := {name: definition for name, definition in pickler.main_definitions.items() if name not in sent}:
            pickler.dump(new)  # can add more definitions
            sent |= new.keys()
        pickler.dump({})
        pickler.dump(source_lines.collect_for_code(pickler.codes) if pickler.codes else {})

    _dump_sections(call, bundle, pickler, dump_section)


def _dump_sections(
    call: Call, bundle: PickleBundle, pickler: pickle.Pickler, dump_section: Callable[[object], None]
) -> None:
    dump_section((call.fn, call.args, call.kwargs, call.backend, call.process_group_version, call.backend_timeout))
    if call.parts:
        memo: Any = pickler.memo.copy()
        for part in call.parts:
            bundle.begin_part()
            pickler.memo = memo
            dump_section(part)


def _pickle_main_description(main: Any) -> bytes:
    """Return a pickle of the attributes of `__main__` that ranks need, such as `__file__`.

    The workers of a DataLoader need these attributes to find the script of the program.
    """
    global _main_description
    description = _describe_main(main)
    last, packed = _main_description
    if last != description:
        packed = pickle.dumps(description, protocol=5)
        _main_description = description, packed
    return packed


def _describe_main(main: Any) -> dict[str, Any]:
    about = {"__package__": getattr(main, "__package__", None), "__doc__": getattr(main, "__doc__", None)}
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name is not None:
        about["spec"] = spec.name
    path = getattr(main, "__file__", None)
    # A DataLoader worker fails if it cannot read this file. '<stdin>' is no file.
    if path is not None and os.path.exists(path):
        about["__file__"] = os.path.abspath(path)
    return about


def unpack(body: bytes, fds: list[int] | None, choose_part: Callable[[int], int]) -> Call:
    """In a rank: unpickle a call, and close the call's descriptors.

    Raises OSError if the rank could not receive the descriptors, or cannot map the bundle's file. Unpickling can run user
    code, so `unpack` can also raise any other exception.

    Args:
        body: the body of the message.
        fds: the descriptors that came with the message, or None if the rank could not receive them.
        choose_part: returns the index of this rank's part. Its argument is the number of parts.
    """
    if fds is None:
        raise OSError(errno.EMFILE, "the descriptors of the call could not be taken in; see `ulimit -n`")
    global _earlier_threads
    _earlier_threads = threading.enumerate()
    try:
        _received_fds[:] = fds if body else fds[1:]
        bundle = OpenBundle(body or map_bundle(fds[0]))
        _load_main_description(bundle.stream)
        unpickler = pickle.Unpickler(bundle.stream, buffers=bundle.buffers)
        fn, args, kwargs, backend, process_group_version, backend_timeout = _load_section(unpickler)
        if bundle.number_of_parts:
            bundle.open_part(choose_part(bundle.number_of_parts))
            args = list(args)
            for key, value in _load_section(unpickler).items():
                (args if isinstance(key, int) else kwargs)[key] = value
        return Call(fn, args, kwargs, backend, process_group_version, backend_timeout=backend_timeout)
    finally:
        _threads_of_imports.update(thread for thread in threading.enumerate() if thread not in _earlier_threads)
        _earlier_threads = None
        _received_fds.clear()
        for fd in fds:
            os.close(fd)


def _load_section(unpickler: pickle.Unpickler) -> Any:
    """Unpickle a section of a call, and return the object that the section contains.

    Also add the section's functions and classes to the rank's `__main__`, and the section's source lines to `linecache`.
    """
    content = unpickler.load()
    while names := unpickler.load():
        vars(sys.modules["__main__"]).update(names)
        caller_definitions.update(names)
    if "linecache" in sys.modules:  # newer Pythons put the interpreter's own `-c` command there
        import linecache  # waits for a thread that is just importing it

        linecache.cache.pop("<string>", None)
        # the same in Python 3.14 and newer, by the name, the function and the first line of the code
        getattr(linecache, "_interactive_cache", {}).pop(("<string>", "<module>", 1), None)
    if sources := unpickler.load():  # of notebook cells and programs on stdin
        from mpwatch.wire.exceptions import source_lines

        source_lines.add_to_linecache(sources)
    return content


def is_unpacking(thread: threading.Thread) -> bool:
    """Return whether this thread of a rank is unpacking a call.

    Also return True if this thread was started while the rank unpacked a call, for example by an imported module.
    """
    if thread in _threads_of_imports:
        return True
    return _earlier_threads is not None and (thread is threading.main_thread() or thread not in _earlier_threads)


def _load_main_description(stream: Any) -> None:
    """Copy attributes of the caller's `__main__`, such as `__file__`, to the rank's `__main__`.

    Unpickle the attributes only if they have changed since the previous call.
    """
    global _main_description
    description, packed = _main_description
    if not packed or stream.read(len(packed)) != packed:
        stream.seek(0)
        description = pickle.load(stream)
        end = stream.tell()
        stream.seek(0)
        packed = stream.read(end)
        _main_description = description, packed
    _set_up_main(sys.modules["__main__"], dict(description))


def _set_up_main(main: Any, about: dict[str, Any]) -> None:
    spec = about.pop("spec", None)
    if spec is not None:
        from importlib.machinery import ModuleSpec

        about["__spec__"] = ModuleSpec(spec, None)
    vars(main).update(about)
