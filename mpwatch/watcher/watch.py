"""The caller's side of a run: it packs the call, has a thread of its own carry the run out, and waits for that.

    caller's thread    pack the call, take the signals over --> wait --> give them back --> rebuild what came --> return
                                      |                          ^
    thread of the run                 `--> loop.carry_out -------'

Python may throw an exception into a thread between any two bytecodes: a signal handler that raises, in the main one, or
`PyThreadState_SetAsyncExc`. One that struck while a rank is being started or reaped would leave it behind. Handlers do not
raise while the caller waits (signals.py), and nobody knows of the run's own thread; so nothing is thrown into what starts,
watches and reaps.

Guarantee: if something is thrown into the caller's thread, the run is stopped as by SIGTERM (at once, if it happens again),
and it leaves `watch` when nothing of the run is left. Off the main thread Python notices it when the run is over.
"""

import os
import signal
import threading
import time
from contextlib import ExitStack, closing
from multiprocessing.context import set_spawning_popen
from typing import Any, TypeVar

from ..platform import await_end_of_thread, standard_descriptors
from ..result import RunResult
from ..spec import WorkerSpec
from .diagnosis import diagnose
from .environment import environments_of, reserve_port
from .facts import Facts
from .loop import carry_out
from .remarks import Remarks
from .sending import pack_call
from .signals import HostSignals

__all__ = ["InterruptError", "watch"]

T = TypeVar("T")
THREAD_SECONDS = 1.0  # for a thread to begin or to end, which takes microseconds


class InterruptError(Exception):
    """Signals to this process came during the run. All is cleaned up; they have yet to do what they would have done."""

    def __init__(self, signals: HostSignals, result: RunResult[Any]) -> None:
        super().__init__(signals, result)
        self.signals = signals
        self.result = result


def watch(spec: WorkerSpec[T]) -> RunResult[T]:
    """Run it to its end. Raises LaunchError, or InterruptError."""
    with standard_descriptors():
        errand = _Errand(spec)
        try:
            errand.prepare()
            errand.run()
            errand.leave()
        except BaseException:
            errand.abort()
            errand.deliver()
            raise
    return errand.result()


class _Errand:
    """The thread of a run, and what it is given. Its methods are the caller's thread's; each may be called again."""

    def __init__(self, spec: WorkerSpec[Any]) -> None:
        self._spec = spec
        self._started_at = time.monotonic()
        self._signals = HostSignals()
        self._remarks = Remarks(self._signals.wake)
        self._held = ExitStack()
        self._held.callback(self._signals.close)
        self._thread: threading.Thread | None = None
        self._is_cancelled = False
        self._is_over = False
        self._facts: Facts | None = None
        self._error: BaseException | None = None

    def prepare(self) -> None:
        """What runs code of the user's runs it here, in the caller's thread: pickling, and the `env` function."""
        assert isinstance(self._spec.nprocs, int)  # whatever the caller gave, see WorkerSpec
        self._payload = self._held.enter_context(closing(pack_call(self._spec)))
        keeper = self._held.enter_context(reserve_port())
        self._ranks = environments_of(self._spec, self._spec.nprocs, keeper.getsockname()[1])

    def run(self) -> None:
        """Until the run is over."""
        self._signals.take_over()
        self._thread = threading.Thread(target=self._carry_out, name="mpwatch")
        try:
            self._thread.start()
        except RuntimeError:  # Python is ending, or there is no room for one more: then it is done here
            self._thread = None
            self._carry_out()
        self._sleep()

    def leave(self) -> None:
        """The host is as it was."""
        if self._thread is not None and self._thread.native_id is not None:
            self._thread.join()  # it has nothing more to do
            await_end_of_thread(self._thread.native_id, THREAD_SECONDS)
        self._signals.give_back()
        self._held.close()
        self._remarks.say()

    def abort(self) -> None:
        """Something has been thrown at us. Stop the run and leave, and let nothing that is thrown meanwhile prevent it."""
        while True:
            try:
                self._is_cancelled = True
                set_spawning_popen(None)  # if packing the call was cut short
                self._signals.tell(signal.SIGTERM)
                if self._has_begun():
                    self._sleep()
                self.leave()
            except BaseException:  # noqa: BLE001, S112  the first one is raised; this one has hurried the run
                continue
            return

    def deliver(self) -> None:
        """What signals had come, do what they would have done."""
        self._signals.deliver()

    def result(self) -> RunResult[Any]:
        """What came of it. Raises what `watch` does."""
        try:
            if self._signals.raised is not None:
                raised, self._signals.raised = self._signals.raised, None
                raise raised
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            assert self._facts is not None
            try:
                result = diagnose(self._facts)
            finally:
                self._facts.forget()
        except BaseException:
            self.deliver()
            raise
        if self._signals.received:
            raise InterruptError(self._signals, result)
        return result

    def _sleep(self) -> None:
        """While the thread is at work. Not by joining it: that has the fault that signals.py tells of."""
        while not self._is_over:
            self._signals.sleep()
            self._remarks.say()

    def _has_begun(self) -> bool:
        """Whether the thread is at work. If its start was interrupted, it may be about to be, and sees that it is late."""
        deadline = time.monotonic() + THREAD_SECONDS
        thread = self._thread
        while thread in threading.enumerate() and not thread.is_alive() and time.monotonic() < deadline:
            os.sched_yield()
        return thread is not None and thread.is_alive()

    def _carry_out(self) -> None:
        try:
            if not self._is_cancelled:
                self._facts = carry_out(
                    self._spec,
                    self._payload,
                    self._ranks,
                    signals=self._signals,
                    remarks=self._remarks,
                    started_at=self._started_at,
                )
        except BaseException as error:  # noqa: BLE001  it is the caller's to raise
            self._error = error
        finally:
            self._is_over = True
            self._signals.wake()
