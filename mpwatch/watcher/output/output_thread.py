"""The thread through which the ranks' output runs: it alone reads the pipes, writes the files, and writes to the caller.

Others post to it what it is to do; it does that, and what comes over the pipes, one after another.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import wait
from selectors import EVENT_READ, DefaultSelector

from mpwatch.errors import LaunchError
from mpwatch.os_support.descriptors import write_all
from mpwatch.os_support.processes import await_end_of_thread
from mpwatch.watcher.commands import WakeupPipe
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.output.multiplexer import OutputMultiplexer
from mpwatch.watcher.output.pipes import OutputPipe
from mpwatch.watcher.output.sinks import Sink
from mpwatch.wire.resource_errors import with_remedy

READ_SIZE = 44 << 10  # bytes: what is made of them stays in the caches, needs no new pages, and fits into a pipe at once
REST_SECONDS = 0.005
DRAIN_LIMIT = 1 << 20  # bytes read of a stream when it is settled: no pipe holds more, unless root has made it so
LAST_SECONDS = 1.0  # for a reader that nobody has to wait for
THREAD_SECONDS = 1.0  # for the thread to end, once it waits for nobody any more


class OutputThread:
    """`post`, `settle`, `finish` and `close` are for other threads, all else for its own. Raises LaunchError.

    It ends, and gives back what it held, when it is told to finish; whoever would close it may be struck by an exception.

    Args:
        remarks: where it is noted that something cannot be written.
    """

    def __init__(self, deferred_log: DeferredLog) -> None:
        self._deferred_log = deferred_log
        with ExitStack() as stack:
            self._watcher_wakeup = stack.enter_context(closing(WakeupPipe()))
            self.stop_waiting_for_reader = stack.enter_context(closing(WakeupPipe()))  # nobody waits any more for who reads
            try:
                self._selector = stack.enter_context(DefaultSelector())
            except OSError as error:
                raise LaunchError(with_remedy("what the ranks print cannot be waited for", error)) from error
            self._held = stack.pop_all()
        self._jobs: deque[Callable[[], None]] = deque()
        self._waiting: set[threading.Event] = set()  # who would wait for ever if the thread ended meanwhile
        self._sources: dict[int, OutputPipe] = {}  # by descriptor
        self._sinks: Mapping[str, Sink | None] = {}
        self._lost: set[str] = set()  # streams of the caller's that nothing can be written to
        self._multiplexer = OutputMultiplexer(is_mixed=True, may_be_mixed=True)
        self._thread: threading.Thread | None = None
        self.is_over = False  # nothing more is done
        self.is_stuck = False  # whoever was waited for last did not read

    def begin(self) -> None:
        """Start the thread, if it has not been started. Raises RuntimeError."""
        if self.is_over:
            raise RuntimeError("nobody reads what it prints any more")
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mpwatch-output", daemon=True)
            thread.start()
            self._thread = thread

    def post(self, job: Callable[[], None]) -> None:
        """Have this done."""
        self._jobs.append(job)
        self._watcher_wakeup.wake()

    def settle(self, seconds: float | None) -> bool:
        """Wait until all that the ranks have written by now is where it belongs. False if that was not in time."""
        return self._wait_for(self._put_in_place, seconds)

    def catch_up(self, seconds: float | None) -> bool:
        """The same of ranks that have ended; others may be in the midst of a line."""
        return self._wait_for(bool, seconds)

    def _wait_for(self, job: Callable[[], object], seconds: float | None) -> bool:
        if self._thread is None:
            return True
        done = threading.Event()
        self._waiting.add(done)
        self.post(partial(self._do, job, done))
        self.is_stuck = not (self.is_over or done.wait(seconds))
        return not self.is_stuck

    def finish(self) -> None:
        """No rank will print any more: end the thread once all is where it belongs."""
        self.post(self._end)

    def close(self) -> None:
        """Give back what it held. A reader that does not read has a second, once."""
        if self._thread is None:
            self._give_back()
            return
        try:
            if not self.is_stuck:
                self.settle(LAST_SECONDS)
        finally:  # it ends, even if this is struck by another Ctrl-C
            self.stop_waiting_for_reader.wake()
            self.finish()
        self._thread.join(THREAD_SECONDS)
        if self._thread.native_id is not None:
            await_end_of_thread(self._thread.native_id)
        if not self._thread.is_alive():
            self._give_back()  # what was posted when it was over

    def attach(self, multiplexer: OutputMultiplexer, sinks: Mapping[str, Sink | None]) -> None:
        """Another call of the ranks: mix what they write by this, and write it to these. What has come since the last one
        is that one's, and is held back no longer.
        """
        self._multiplexer.pause(time.monotonic())
        self._write_out()
        self._close_sinks()
        self._multiplexer, self._sinks = multiplexer, sinks
        self._lost.clear()

    def add(self, sources: Sequence[OutputPipe]) -> None:
        """A rank is about to be started."""
        for source in sources:
            self._sources[source.pipe] = source
            if not self.is_over:
                self._selector.register(source.pipe, EVENT_READ, source)
                source.is_open = True

    def end(self, sources: Sequence[OutputPipe], unsaid: bytes) -> None:
        """A rank has ended, and what it had started in its process group. This is left for its stderr."""
        ours = [source for source in sources if self._sources.get(source.pipe) is source]  # none after an error
        for source in ours:
            if source.stderr_tail is not None and unsaid:
                self._take_in(source, unsaid)
            self._drain(source)
        for source in ours:
            self._finish(source)

    def _run(self) -> None:
        try:
            self._selector.register(self._watcher_wakeup, EVENT_READ)
            while not self.is_over:
                self._turn()
        except BaseException as error:  # noqa: BLE001  an error of ours: the ranks are to hear of it, and not to wait for ever
            self._deferred_log.warning("what the ranks print is lost from here on: %r", error)
        finally:
            self._give_back()

    def _turn(self) -> None:
        due_at = self._multiplexer.due_at
        patience = None if due_at == math.inf else max(0.0, due_at - time.monotonic())
        sizes = [0]
        for key, _ in self._selector.select(patience):
            if key.fileobj is self._watcher_wakeup:
                self._watcher_wakeup.drain()
            elif (source := self._sources.get(key.fd)) is not None and source is key.data:  # not ended by a job
                sizes.append(self._read(source))
            self._do_jobs()
        self._multiplexer.expire(time.monotonic())
        self._write_out()
        if 0 < max(sizes) < READ_SIZE:
            self._rest()

    def _rest(self) -> None:
        """Let more come, if what came was little: who prints line by line would wake us up for each, which costs either side
        more than to print it. What is posted is done at once.
        """
        if wait([self._watcher_wakeup.fileno()], REST_SECONDS):
            self._watcher_wakeup.drain()
            self._do_jobs()

    def _do_jobs(self) -> None:
        while self._jobs:
            self._jobs.popleft()()

    def _read(self, source: OutputPipe) -> int:
        """One portion; how many bytes, none if there were none."""
        data = source.read(READ_SIZE) if source.is_open else None
        if data:
            self._take_in(source, data)
        elif data is not None:
            self._wait_no_more(source)
        return len(data or b"")

    def _take_in(self, source: OutputPipe, data: bytes) -> None:
        if source.stderr_tail is not None:
            source.stderr_tail.hear(data)
        if source.file is not None:
            self._write_to_file(source, source.file, data)
        if source.rank_stream is not None:
            self._multiplexer.hear(source.rank_stream, data, time.monotonic())
            self._write_out()

    def _drain(self, source: OutputPipe) -> None:
        """What it holds by now. There may be a helper of the rank that writes on and on."""
        for _ in range(-(-DRAIN_LIMIT // READ_SIZE)):
            if not self._read(source):
                break

    def _finish(self, source: OutputPipe) -> None:
        if source.rank_stream is not None:
            self._multiplexer.end(source.rank_stream)
            self._write_out()
        self._wait_no_more(source)
        del self._sources[source.pipe]
        source.close()

    def _wait_no_more(self, source: OutputPipe) -> None:
        """Everybody has closed it; but the rank's stderr may yet get what its interpreter has printed."""
        if source.is_open:
            source.is_open = False
            self._selector.unregister(source.pipe)

    def _do(self, job: Callable[[], object], done: threading.Event) -> None:
        job()
        self._waiting.discard(done)
        done.set()

    def _end(self) -> None:
        self._put_in_place()
        self.is_over = True

    def _put_in_place(self) -> None:
        """What has been written by now."""
        for source in list(self._sources.values()):
            self._drain(source)
        self._multiplexer.pause(time.monotonic())
        self._write_out()
        for stream, sink in self._sinks.items():
            if sink is not None:
                self._try(stream, sink.flush)

    def _write_out(self) -> None:
        for stream, data in self._multiplexer.take():
            sink = self._sinks.get(stream)
            if sink is not None:
                self._try(stream, partial(sink.write, data))

    def _try(self, stream: str, do: Callable[[], bool | None]) -> None:
        """Whoever reads the caller's stream may have gone, or the stream be an object that raises what it likes."""
        if stream in self._lost:
            return
        try:
            why = "nobody reads it" if do() is False else ""
        except BaseException as error:  # noqa: BLE001
            why = f"{type(error).__name__}: {error}"
        if why:
            self._lost.add(stream)
            self._deferred_log.warning("what the ranks print cannot be written to %s any more (%s)", stream, why)

    def _write_to_file(self, source: OutputPipe, file: int, data: bytes) -> None:
        try:
            write_all(file, data)
        except OSError as error:
            source.close_file()
            self._deferred_log.warning("%s is not complete: %s", source.path, error)

    def _give_back(self) -> None:
        self.is_over = True
        with ExitStack() as stack:
            stack.callback(self._close_all)
            while self._jobs:
                self._jobs.popleft()()

    def _close_all(self) -> None:
        while self._sources:
            self._sources.popitem()[1].close()
        self._close_sinks()
        self._held.close()
        while self._waiting:  # in vain, if there was an error
            self._waiting.pop().set()

    def _close_sinks(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            if sink is not None:
                sink.close()
