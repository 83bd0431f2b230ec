"""The output thread: reads the ranks' pipes, writes the log files, and writes to the caller's streams.

Other threads give jobs to the output thread (`post`). The output thread runs jobs and reads pipes one after another, so it
needs no locks. The bytes from a pipe take this way:

    OutputPipe.read --> StderrTail.feed (stderr) --> log file --> OutputMultiplexer.feed --> Sink.write (the caller's stream)
"""

import math
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import wait
from selectors import EVENT_READ, DefaultSelector

from mpwatch.errors import LaunchError
from mpwatch.os_support.clock import monotonic
from mpwatch.os_support.descriptors import write_all
from mpwatch.os_support.processes import wait_for_thread_exit
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.output.multiplexer import OutputMultiplexer
from mpwatch.watcher.output.pipes import OutputPipe
from mpwatch.watcher.output.sinks import Sink
from mpwatch.watcher.wakeup_pipe import WakeupPipe
from mpwatch.wire.resource_errors import with_remedy

READ_SIZE = 44 << 10  # bytes: all that is made of them stays in the caches, needs no new pages, and fits into a pipe at once
BATCH_SECONDS = 0.005
DRAIN_LIMIT = 1 << 20  # bytes read when a stream is drained: no pipe holds more, unless root has raised the limit
LAST_DRAIN_SECONDS = 1.0  # how long a slow reader delays the end of a call that need not wait for it
JOIN_SECONDS = 1.0  # for the thread to end, once it does not wait for a reader


class OutputThread:
    """Starts the output thread, gives it jobs, and ends it. Raises LaunchError.

    `hold`, `start_call`, `add_pipes` and `end_pipes` run in the thread: other threads `post` them. After
    `stop_when_drained`, it ends by itself, even if Ctrl-C prevents the call of `close`.
    """

    def __init__(self, deferred_log: DeferredLog) -> None:
        self._deferred_log = deferred_log
        with ExitStack() as stack:
            self._job_wakeup = stack.enter_context(closing(WakeupPipe()))
            # woken when sinks are not to wait any longer for the reader of the caller's stream
            self.stop_waiting_for_reader = stack.enter_context(closing(WakeupPipe()))
            try:
                self._selector = stack.enter_context(DefaultSelector())
            except OSError as error:
                raise LaunchError(with_remedy("the output of the ranks cannot be read", error)) from error
            self._resources = stack.pop_all()
        self._jobs: deque[Callable[[], None]] = deque()
        self._waiters: set[threading.Event] = set()  # set when the thread ends, so that no thread waits for it without limit
        self._pipes: dict[int, OutputPipe] = {}  # by descriptor
        self._sinks: Mapping[str, Sink | None] = {}
        self._broken_sinks: set[str] = set()  # the caller's streams that nothing more is written to
        self._multiplexer = OutputMultiplexer(is_line_mode=True, has_several_ranks=True)
        self._thread: threading.Thread | None = None
        self._is_held = False  # only jobs run, such as `_drain_all`
        self._is_drained = False  # nothing was read since the last `_drain_all`; set to False before a read
        self.is_over = False  # the thread reads and writes nothing more
        self.is_reader_stalled = False  # the last wait for the reader of the caller's streams reached its time limit

    # --- for other threads

    def start(self) -> None:
        if self.is_over:
            raise RuntimeError("the thread that reads the output of the ranks has ended")
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mpwatch-output", daemon=True)
            thread.start()
            self._thread = thread

    def post(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._job_wakeup.wake()

    def hold(self, is_held: bool) -> None:
        """While output is held back, the thread reads pipes and writes output only in jobs such as `_drain_all`."""
        self._is_held = is_held

    def drain_all(self, timeout: float | None, *, with_unfinished_lines: bool = True) -> bool:
        """Wait until all that the ranks have written is in the log files and the caller's streams. Return False after
        `timeout`.
        """
        return not self.has_output() or self._wait_for(
            partial(self._drain_all, with_unfinished_lines=with_unfinished_lines), timeout
        )

    def has_output(self) -> bool:
        """Return False if it is certain that the output thread has written all output of the ranks, and True otherwise."""
        poll = select.poll()
        for pipe in list(self._pipes.values()):
            if pipe.is_polled:
                poll.register(pipe.fd, select.POLLIN)
        # The order matters: the output thread sets `_is_drained` to False before it reads bytes from a pipe.
        return bool(poll.poll(0)) or bool(self._jobs) or not self._is_drained

    def drain_ended_ranks(self, timeout: float | None) -> bool:
        """Wait until all earlier jobs are done, among them `end_pipes` of the ended ranks. Return False after `timeout`."""
        return self._wait_for(lambda: None, timeout)

    def _wait_for(self, job: Callable[[], object], timeout: float | None) -> bool:
        if self._thread is None:
            return True
        done = threading.Event()
        self._waiters.add(done)
        self.post(partial(self._run_and_notify, job, done))
        self.is_reader_stalled = not (self.is_over or done.wait(timeout))
        return not self.is_reader_stalled

    def stop_when_drained(self) -> None:
        """After the end of the last rank: write what is left, and exit. Returns at once."""
        self.post(self._drain_and_stop)

    def close(self) -> None:
        """Wait at most LAST_DRAIN_SECONDS for a slow reader of the caller's streams."""
        if self._thread is None:
            self._release()
            return
        try:
            if not self.is_reader_stalled:
                self.drain_all(LAST_DRAIN_SECONDS)
        finally:  # the thread has to end even if another Ctrl-C is raised here
            self.stop_waiting_for_reader.wake()
            self.stop_when_drained()
        self._thread.join(JOIN_SECONDS)
        if self._thread.native_id is not None:
            wait_for_thread_exit(self._thread.native_id)
        if not self._thread.is_alive():
            self._release()  # run the jobs that were posted after the thread had ended

    # --- jobs

    def start_call(self, multiplexer: OutputMultiplexer, sinks: Mapping[str, Sink | None]) -> None:
        """Write the remaining output of earlier calls. Use this multiplexer and these sinks for the output of a new call."""
        self._multiplexer.flush(monotonic())
        self._write_to_sinks()
        self._close_sinks()
        self._multiplexer, self._sinks = multiplexer, sinks
        self._broken_sinks.clear()

    def add_pipes(self, pipes: Sequence[OutputPipe]) -> None:
        for pipe in pipes:
            self._pipes[pipe.fd] = pipe
            if not self.is_over:
                self._selector.register(pipe.fd, EVENT_READ, pipe)
                pipe.is_polled = True

    def end_pipes(self, pipes: Sequence[OutputPipe], startup_output: bytes) -> None:
        """Drain and close the pipes of a rank when its process group has ended, and write what its interpreter printed, if
        it did not.
        """
        open_pipes = [pipe for pipe in pipes if self._pipes.get(pipe.fd) is pipe]  # none after an error of this thread
        for pipe in open_pipes:
            if pipe.stderr_tail is not None and startup_output:
                self._distribute(pipe, startup_output)
            self._drain(pipe)
        for pipe in open_pipes:
            if pipe.rank_stream is not None:
                self._multiplexer.end_stream(pipe.rank_stream)
                self._write_to_sinks()
            self._stop_polling(pipe)
            del self._pipes[pipe.fd]
            pipe.close()

    def _run_and_notify(self, job: Callable[[], object], done: threading.Event) -> None:
        job()
        self._waiters.discard(done)
        done.set()

    def _drain_all(self, *, with_unfinished_lines: bool = True) -> None:
        for pipe in list(self._pipes.values()):
            self._drain(pipe)
        if with_unfinished_lines:
            self._multiplexer.flush(monotonic())
        self._write_to_sinks()
        for stream, sink in self._sinks.items():
            if sink is not None:
                self._call_sink(stream, sink.flush)
        self._is_drained = with_unfinished_lines

    def _drain_and_stop(self) -> None:
        self._drain_all()
        self.is_over = True

    # --- the loop

    def _run(self) -> None:
        try:
            self._selector.register(self._job_wakeup, EVENT_READ)
            while not self.is_over:
                self._run_once()
        except BaseException as error:  # noqa: BLE001  a bug in this thread: ranks get EPIPE and do not block
            self._deferred_log.warning("the output of the ranks is lost from here on, by a bug in mpwatch: %r", error)
        finally:
            self._release()

    def _run_once(self) -> None:
        if self._is_held:
            wait([self._job_wakeup.fileno()])
            self._job_wakeup.drain()
            self._run_jobs()
            return
        due_at = self._multiplexer.due_at
        timeout = None if due_at == math.inf else max(0.0, due_at - monotonic())
        sizes = [0]
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._job_wakeup:
                self._job_wakeup.drain()
            elif (pipe := self._pipes.get(key.fd)) is not None and pipe is key.data:  # no job has closed it meanwhile
                sizes.append(self._read(pipe))
            self._run_jobs()
        self._multiplexer.write_due(monotonic())
        self._write_to_sinks()
        if 0 < max(sizes) < READ_SIZE:
            self._wait_for_batch()

    def _wait_for_batch(self) -> None:
        """After a small read, wait BATCH_SECONDS for more output or a job. Without it, each printed line would wake this
        thread, which costs a rank more than printing.
        """
        if wait([self._job_wakeup.fileno()], BATCH_SECONDS):
            self._job_wakeup.drain()
            self._run_jobs()

    def _run_jobs(self) -> None:
        while self._jobs:
            self._jobs.popleft()()

    def _drain(self, pipe: OutputPipe) -> None:
        """Read at most about DRAIN_LIMIT bytes, because a child of the rank may never stop writing."""
        for _ in range(-(-DRAIN_LIMIT // READ_SIZE)):
            if not self._read(pipe):
                break

    def _read(self, pipe: OutputPipe) -> int:
        """Read once from the pipe. Pass the bytes to the log file and the multiplexer. Return how many bytes were read."""
        self._is_drained = False
        data = pipe.read(READ_SIZE) if pipe.is_polled else None
        if data:
            self._distribute(pipe, data)
        elif data is not None:
            self._stop_polling(pipe)
        return len(data or b"")

    def _distribute(self, pipe: OutputPipe, data: bytes) -> None:
        if pipe.stderr_tail is not None:
            pipe.stderr_tail.feed(data)
        if pipe.file_fd is not None:
            self._write_to_file(pipe, pipe.file_fd, data)
        if pipe.rank_stream is not None:
            self._multiplexer.feed(pipe.rank_stream, data, monotonic())
            self._write_to_sinks()

    def _stop_polling(self, pipe: OutputPipe) -> None:
        """All writers have closed the pipe. The log file stays open for what `end_pipes` may add."""
        if pipe.is_polled:
            pipe.is_polled = False
            self._selector.unregister(pipe.fd)

    def _write_to_file(self, pipe: OutputPipe, file_fd: int, data: bytes) -> None:
        try:
            write_all(file_fd, data)
        except OSError as error:
            pipe.close_file()
            self._deferred_log.warning("the log file %s is incomplete: %s", pipe.path, error)

    def _write_to_sinks(self) -> None:
        for stream, data in self._multiplexer.take_pending():
            sink = self._sinks.get(stream)
            if sink is not None:
                self._call_sink(stream, partial(sink.write, data))

    def _call_sink(self, stream: str, call: Callable[[], bool | None]) -> None:
        """If the sink raises an exception or returns False, log a warning and write nothing more to it."""
        if stream in self._broken_sinks:
            return
        try:
            why = "its reader does not read" if call() is False else ""
        except BaseException as error:  # noqa: BLE001
            why = f"{type(error).__name__}: {error}"
        if why:
            self._broken_sinks.add(stream)
            self._deferred_log.warning(
                "the output of the ranks can no longer be written to %s: its rest is dropped (%s)", stream, why
            )

    # --- the end

    def _release(self) -> None:
        self.is_over = True
        with ExitStack() as stack:
            stack.callback(self._close_all)
            self._run_jobs()

    def _close_all(self) -> None:
        while self._pipes:
            self._pipes.popitem()[1].close()
        self._close_sinks()
        self._resources.close()
        while self._waiters:  # after an error of this thread
            self._waiters.pop().set()

    def _close_sinks(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            if sink is not None:
                sink.close()
