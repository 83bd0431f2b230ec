"""Pickle a call once for all ranks, and unpickle it in each: the function, its arguments, what they use of `__main__`.

    bundle:       [ about __main__ ][ fn, args, kwargs, ... ][ names to set in __main__ ]...[ {} ][ sources ]
                                     `---------------------- pickles with one memo -------------------------'
    descriptors:  of the bundle's file, if it has one (bundle.py); then of the connections and shared tensors in the call

A rank does not import `__main__`. Functions and classes of `__main__` are pickled by value (pickler.py). The rank sets them
in its own `__main__`, whose dictionary *is* the globals of these functions. So plain pickle, torch.save and DataLoader
workers find there what they look up by name.

Most calls use functions of modules, which pickle sends by name. `PlainPickler` sends these without cloudpickle, whose
import (25 ms) takes longer than all other work of the watcher. It raises if it meets anything of `__main__`; then
pickler.py sends the call, which is always right.

Some objects pickle only while multiprocessing spawns a process: locks, queues, connections, tensors in shared memory.
`_Parcel` stands in for the process being spawned, and duplicates their descriptors.
"""

from __future__ import annotations

import copyreg
import errno
import os
import pickle
import sys

from mpwatch.wire.exceptions import source_lines
from mpwatch.wire.pickling.pickle_buffers import REDUCERS, NullBundle, PickleBundle, mapped, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Self

# Bytes of a call that goes over the channel itself: sending it must not block, and some systems' sockets hold 8 KiB.
SMALL = 7 << 10


class Call:
    """What a rank is asked to do."""

    __slots__ = ("args", "backend", "epoch", "fn", "kwargs")

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        backend: str | None,
        epoch: int | None = None,
    ) -> None:
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.backend = backend  # of the process group that is there while fn runs
        self.epoch = epoch  # that group is kept for as long as this stays the same; None: for this call alone


class Payload:
    """A packed call: owns its bundle, and the descriptors within the arguments. Close it when no rank needs it any more; it
    is closed when it is dropped.
    """

    def __init__(self, bundle: PickleBundle) -> None:
        self._copies: list[int] = []
        self._bundle = bundle

    @property
    def body(self) -> bytes:
        """What a rank needs to `unpack` it."""
        return self._bundle.body

    @property
    def fds(self) -> list[int]:
        """The descriptors that it needs for that."""
        file = self._bundle.file
        return [*([] if file is None else [file.fileno()]), *self._copies]

    def add_copy(self, fd: int) -> int:
        """Keep a copy of ours of this descriptor: the caller may close its own before the last rank has started."""
        self._copies.extend(map(os.dup, [fd]))  # one call of C, as in os_support.descriptors.anonymous_file
        return len(self._copies) - 1

    def close(self) -> None:
        """Give the descriptors back."""
        while self._copies:
            os.close(self._copies.pop())
        self._bundle.close()

    __del__ = close


class InheritedFd:
    """A descriptor of the caller's within a payload: `detach` gives the rank's own copy of it."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        """The rank's descriptor; whoever asks owns it."""
        return os.dup(_arrived[self.index])


from_caller: dict[str, object] = {}  # in a rank: what of its `__main__` is the caller's own, by name
_arrived: list[int] = []  # in a rank, while it unpacks: the descriptors that came with the call


class _SpawnPopenStub:
    """What multiprocessing takes for the process being spawned, while one pickle for all of them is made."""

    DupFd = InheritedFd

    def __init__(self, add_copy: Callable[[int], int]) -> None:
        self._add_copy = add_copy

    def __enter__(self) -> Self:
        from multiprocessing import context

        set_spawning_popen: Any = context.set_spawning_popen
        set_spawning_popen(self)  # of this thread
        return self

    def __exit__(self, *_: object) -> None:
        from multiprocessing.context import set_spawning_popen

        set_spawning_popen(None)

    def duplicate_for_child(self, fd: int) -> int:
        return self._add_copy(fd)


def pack(call: Call) -> Payload:
    """Pickle a call. Raises whatever pickling raises, and OSError; nothing is left open then."""
    if _may_be_plain(call.fn):
        try:
            return _pack(call, _dump_plainly)
        except (OSError, MemoryError):
            raise
        except Exception:  # noqa: BLE001, S110  it uses __main__, or cannot be pickled at all; then _dump raises again
            pass
    return _pack(call, _dump)


def _pack(call: Call, dump: Callable[[Call, PickleBundle], None]) -> Payload:
    bundle = PickleBundle("mpwatch-call", SMALL)
    payload = Payload(bundle)
    try:
        with _SpawnPopenStub(payload.add_copy):
            pickle.dump(_describe(sys.modules["__main__"]), bundle, protocol=5)
            dump(call, bundle)
        bundle.finish()
    except BaseException:
        payload.close()
        raise
    return payload


def probe(thing: object) -> None:
    """Pickle one thing as `pack` would, for the sake of the exception that this raises."""
    from mpwatch.wire.pickling.pickler import CallPickler

    with _SpawnPopenStub(lambda _: 0):
        CallPickler(NullBundle(), sys.modules["__main__"]).dump(thing)


class PlainPickler(pickle.Pickler):
    """Pickles functions and classes by name, and raises for those of `__main__`.

    Args:
        bundle: where the pickle goes.
    """

    def __init__(self, bundle: PickleBundle | NullBundle) -> None:
        from mpwatch.wire.pickling.reducers import multiprocessing_reducers, torch_reducers

        # before __init__, because the C pickler reads it there
        self.dispatch_table = {**multiprocessing_reducers(), **copyreg.dispatch_table, **REDUCERS, **torch_reducers()}
        super().__init__(bundle, 5, buffer_callback=bundle.keep)

    def reducer_override(self, obj: Any) -> Any:
        """Raise for functions and classes of `__main__`, and for their instances. Called by pickle for each object."""
        if getattr(obj, "__module__", None) == "__main__":
            # Nobody sees this text. It has no repr of the object, because that could run the user's code.
            raise pickle.PicklingError("of __main__")
        return NotImplemented


def _may_be_plain(fn: object) -> bool:
    """Whether `PlainPickler` may be able to send a call of this function."""
    if getattr(fn, "__module__", None) == "__main__":
        return False
    cloudpickle = sys.modules.get("cloudpickle")
    return cloudpickle is None or not cloudpickle.list_registry_pickle_by_value()


def _dump_plainly(call: Call, bundle: PickleBundle) -> None:
    pickler = PlainPickler(bundle)
    pickler.dump((call.fn, call.args, call.kwargs, call.backend, call.epoch))
    pickler.dump({})
    pickler.dump({})


def _dump(call: Call, bundle: PickleBundle) -> None:
    from mpwatch.wire.pickling.pickler import CallPickler

    pickler = CallPickler(bundle, sys.modules["__main__"])
    pickler.dump((call.fn, call.args, call.kwargs, call.backend, call.epoch))
    sent: set[str] = set()
    while new := {name: thing for name, thing in pickler.from_main.items() if name not in sent}:
        pickler.dump(new)  # which may bring more along
        sent |= new.keys()
    pickler.dump({})
    pickler.dump(source_lines.of_code(pickler.codes) if pickler.codes else {})


def _describe(main: Any) -> dict[str, Any]:
    """What a rank's `__main__` must say of itself, so that a DataLoader's workers find the script again."""
    about = {"__package__": getattr(main, "__package__", None), "__doc__": getattr(main, "__doc__", None)}
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name is not None:
        about["spec"] = spec.name
    path = getattr(main, "__file__", None)
    # '<stdin>' is no file that a worker could read, and it would die of the attempt
    if path is not None and os.path.exists(path):
        about["__file__"] = os.path.abspath(path)
    return about


def unpack(body: bytes, fds: list[int] | None) -> Call:
    """In a rank: the call that came so; the descriptors are closed. Raises whatever unpickling raises, and OSError.

    Args:
        body: of the message.
        fds: the descriptors that came with it; None if they could not be taken in.
    """
    if fds is None:
        raise OSError(errno.EMFILE, "the descriptors of the call could not be taken in; see `ulimit -n`")
    try:
        _arrived[:] = fds if body else fds[1:]
        stream, buffers = opened(body or mapped(fds[0]))
        main = sys.modules["__main__"]
        _introduce(main, pickle.load(stream))
        unpickler = pickle.Unpickler(stream, buffers=buffers)
        fn, args, kwargs, backend, epoch = unpickler.load()
        while names := unpickler.load():
            vars(main).update(names)
            from_caller.update(names)
        source_lines.take_over(unpickler.load())
        return Call(fn, args, kwargs, backend, epoch)
    finally:
        _arrived.clear()
        for fd in fds:
            os.close(fd)


def _introduce(main: Any, about: dict[str, Any]) -> None:
    spec = about.pop("spec", None)
    if spec is not None:
        from importlib.machinery import ModuleSpec

        about["__spec__"] = ModuleSpec(spec, None)
    vars(main).update(about)
