"""Writes the output of the ranks to log files and to the caller's streams. Read this module first.

    rank's process           output thread of the watcher's process                           where it arrives
    --------------           --------------------------------------                           ----------------
    stdout --- pipe ---.     rank_output.py  reads each pipe --------- bytes as they are ---> log file
    stderr --- pipe ---+---------> |                '---- stderr only: StderrTail ----------> report of a failure
               pipes.py            v
                             rank_stream.py    one rank: bytes as they are; several ranks: lines with prefixes
                                   |
                                   v
                             sinks.py ------------------------------------------------------> caller's sys.stdout and
                                                                                              sys.stderr, notebook cell

A stream that is neither shown nor written to a file goes to /dev/null, or to the caller's descriptor.

Guarantees:
    - No line is lost, as long as the caller's streams accept everything that is written to them.
    - A slow reader of the caller's stdout or stderr delays the output thread, and then the ranks. A slow reader never delays
      the watcher thread. The caller's thread waits for the reader only in `drain_all` and `close`. If the reader does not
      read, `close` leaves the thread, which ends when the reader goes on or the program ends.
    - When `drain_all` has returned True, all output that a rank wrote before it answered the call or died has arrived in the
      log files and the caller's streams.
    - No thread waits for end-of-file on a pipe, because a child process of a rank can keep the pipe open.
    - The use of memory is bounded, because bytes are written before more bytes are read.
"""

import math
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from io import FileIO
from multiprocessing.connection import wait
from selectors import EVENT_READ, DefaultSelector

from mpwatch.errors import LaunchError
from mpwatch.options.log_spec import STREAMS, LogSpec
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.descriptors import write_all
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.watcher.inbox import Inbox, Outbox
from mpwatch.watcher.output.pipes import OutputPipe, StdioFds, open_stdio
from mpwatch.watcher.output.rank_stream import RankStream
from mpwatch.watcher.output.sinks import Sink, open_sink
from mpwatch.wire.resource_errors import with_remedy

READ_SIZE = 44 << 10  # bytes: all that is made of them stays in the caches, needs no new pages, and fits into a pipe at once
BATCH_SECONDS = 0.005
DRAIN_LIMIT = 1 << 20  # bytes read when a stream is drained: no pipe holds more, unless root has raised the limit
LAST_DRAIN_SECONDS = 1.0  # how long a slow reader delays the end of a call that need not wait for it
STALLED_SECONDS = 0.1  # the same, if it has been waited for already


class RankOutput:
    """The output of all ranks of one watcher thread, and the output thread, if any stream goes over a pipe.

    The watcher thread calls `open_stdio`, `end_rank` and `stop_when_drained`, and the caller's thread the others; but the
    watcher thread also calls `close`, if Python deletes a WorkerGroup that was not closed. Everything below "jobs" runs in
    the output thread, so it needs no locks. In a job of several nodes, `nprocs` is not known at first.
    """

    def __init__(self, spec: LogSpec, nprocs: int | None, outbox: Outbox) -> None:
        self._spec, self._outbox = spec, outbox
        self._shown_ranks = spec.count_shown_ranks(nprocs)
        self._has_lines = bool(spec.prefix) or self._shown_ranks > 1
        with ExitStack() as stack:
            self._jobs = stack.enter_context(closing(Inbox()))
            try:
                self._selector = stack.enter_context(DefaultSelector())
            except OSError as error:
                raise LaunchError(with_remedy("the output of the ranks cannot be read", error)) from error
            self._resources = stack.pop_all()
        self._pipes: list[OutputPipe] = []  # that a process can still write to
        self._sinks: dict[str, Sink] = {}  # by the caller's stream, without those that nothing more is written to
        self._thread: threading.Thread | None = None
        self._is_held = False  # only jobs run, such as `_drain_all`
        self._is_over = False  # the thread reads and writes nothing more
        self.is_reader_stalled = False  # the last wait for the reader of the caller's streams reached its time limit

    def use_current_streams(self) -> None:
        """At the begin of a call, choose the present sys.stdout and sys.stderr, which in a notebook belong to the cell."""
        if self._is_over or not self._shown_ranks:
            return
        targets = {stream: getattr(self._spec, stream) or getattr(sys, stream) for stream in STREAMS}
        sinks = {stream: sink for stream, target in targets.items() if (sink := open_sink(target)) is not None}
        self._jobs.post(partial(self._start_call, sinks))

    def open_stdio(self, worker: Worker, child_ends: ExitStack) -> StdioFds:
        """Raises LaunchError and OSError, and RuntimeError if the output thread cannot be started. See pipes.py."""
        stdio = open_stdio(self._spec, worker, child_ends, host=platform.node(), has_lines=self._has_lines)
        if stdio.pipes:
            self._jobs.post(partial(self._add_pipes, stdio.pipes))
            self._start()
        return stdio

    def _start(self) -> None:
        if self._is_over:
            raise RuntimeError("the thread that reads the output of the ranks has ended")
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mpwatch-output", daemon=True)
            thread.start()
            self._thread = thread

    def end_rank(self, stdio: StdioFds) -> None:
        self._jobs.post(partial(self._end_pipes, stdio.pipes))

    def hold(self, *, is_held: bool) -> None:
        """While a debugger's prompt is open, output waits until `drain_all`, and so does a rank whose pipe is full."""
        self._jobs.post(partial(setattr, self, "_is_held", is_held))

    def drain_all(self, timeout: float | None) -> bool:
        """Wait until the log files and the caller's streams have all that was written. Return False after `timeout`."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._jobs.post(partial(self._drain_and_notify, done))
        self.is_reader_stalled = not (self._is_over or done.wait(timeout))
        return not self.is_reader_stalled

    def stop_when_drained(self) -> None:
        """After the end of the last rank: write what is left, and end the thread. Returns at once."""
        self._jobs.post(self._drain_and_stop)

    def close(self) -> None:
        """Wait at most LAST_DRAIN_SECONDS for a slow reader of the caller's streams."""
        if self._thread is not None:
            self.stop_when_drained()
            self._thread.join(STALLED_SECONDS if self.is_reader_stalled else LAST_DRAIN_SECONDS)
            if self._thread.is_alive():
                return
            if self._thread.native_id is not None:
                wait_for_thread_exit(self._thread.native_id)
        self._release()  # run the jobs that were posted after the thread had ended

    # --- jobs

    def _start_call(self, sinks: dict[str, Sink]) -> None:
        """End the lines of earlier calls. Use these sinks for the output of a new call."""
        for pipe in self._pipes:
            self._show(pipe.rank_stream, pipe.rank_stream.end_line())
        self._close_sinks()
        self._sinks = sinks

    def _add_pipes(self, pipes: Sequence[OutputPipe]) -> None:
        for pipe in pipes:
            if self._is_over:
                pipe.close()
            else:
                self._pipes.append(pipe)
                self._selector.register(pipe.fd, EVENT_READ, pipe)

    def _end_pipes(self, pipes: Sequence[OutputPipe]) -> None:
        for pipe in pipes:
            self._drain(pipe)
            self._end(pipe)

    def _drain_and_notify(self, done: threading.Event) -> None:
        try:
            self._drain_all()
        finally:
            done.set()

    def _drain_all(self) -> None:
        for pipe in list(self._pipes):
            self._drain(pipe)
            self._show(pipe.rank_stream, pipe.rank_stream.take_update())
        for stream, sink in list(self._sinks.items()):
            self._call_sink(stream, sink.flush)

    def _drain_and_stop(self) -> None:
        self._drain_all()
        self._is_over = True

    # --- the loop

    def _run(self) -> None:
        try:
            self._selector.register(self._jobs.wakeup, EVENT_READ)
            while not self._is_over:
                self._run_once()
        except BaseException as error:  # noqa: BLE001  a bug in this thread: ranks get EPIPE and do not block
            self._outbox.warn("the output of the ranks is lost from here on, by a bug in mpwatch: %r", error)
        finally:
            self._release()

    def _run_once(self) -> None:
        if self._is_held:
            self._wait_for_jobs(None)
            return
        due_at = min((pipe.rank_stream.due_at for pipe in self._pipes), default=math.inf)
        ready = self._selector.select(None if due_at == math.inf else max(0.0, due_at - monotonic()))
        if any(key.data is None for key, _ in ready):
            self._jobs.run_all()  # first: `_start_call` was posted before the call wrote anything
        sizes = [self._read(key.data) for key, _ in ready if key.data is not None]
        for pipe in self._pipes:
            if pipe.rank_stream.due_at <= monotonic():
                self._show(pipe.rank_stream, pipe.rank_stream.take_update())
        if 0 < max(sizes, default=0) < READ_SIZE:
            # Wait for more output: else each printed line would wake this thread, which costs a rank more than printing.
            self._wait_for_jobs(BATCH_SECONDS)

    def _wait_for_jobs(self, seconds: float | None) -> None:
        if wait([self._jobs.wakeup.fileno()], seconds):
            self._jobs.run_all()

    def _drain(self, pipe: OutputPipe) -> None:
        """Read at most about DRAIN_LIMIT bytes, because a child of the rank may never stop writing."""
        for _ in range(-(-DRAIN_LIMIT // READ_SIZE)):
            if not self._read(pipe):
                break

    def _read(self, pipe: OutputPipe) -> int:
        """Read once from the pipe, and pass the bytes on. Return how many. At the end, when nobody can write any more, 0."""
        if not pipe.is_open:
            return 0
        try:
            data = os.read(pipe.fd, READ_SIZE)
        except BlockingIOError:
            return 0
        if not data:
            self._end(pipe)
            return 0
        if pipe.stderr_tail is not None:
            pipe.stderr_tail.feed(data)
        if pipe.file is not None:
            self._write_to_file(pipe, pipe.file, data)
        self._show(pipe.rank_stream, pipe.rank_stream.feed(data, monotonic()))
        return len(data)

    def _end(self, pipe: OutputPipe) -> None:
        if pipe.is_open:
            self._show(pipe.rank_stream, pipe.rank_stream.end_line())
            self._pipes.remove(pipe)
            self._selector.unregister(pipe.fd)
            pipe.close()

    def _write_to_file(self, pipe: OutputPipe, file: FileIO, data: bytes) -> None:
        try:
            write_all(file.fileno(), data)
        except OSError as error:
            pipe.file = None
            file.close()
            self._outbox.warn("the log file %s is incomplete: %s", file.name, error)

    def _show(self, rank_stream: RankStream, data: bytes) -> None:
        stream = rank_stream.stream
        if stream is not None and data and (sink := self._sinks.get(stream)) is not None:
            self._call_sink(stream, partial(sink.write, rank_stream.add_prefix(data, is_coloured=sink.has_colours)))

    def _call_sink(self, stream: str, call: Callable[[], None]) -> None:
        """If the sink raises an exception, log a warning and write nothing more to it."""
        try:
            call()
        except BaseException as error:  # noqa: BLE001
            self._sinks.pop(stream).close()
            text = "the output of the ranks can no longer be written to %s: its rest is dropped (%s: %s)"
            self._outbox.warn(text, stream, type(error).__name__, error)

    # --- the end

    def _release(self) -> None:
        self._is_over = True
        try:
            self._jobs.run_all()
        finally:
            while self._pipes:
                self._pipes.pop().close()
            self._close_sinks()
            self._resources.close()

    def _close_sinks(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.close()
