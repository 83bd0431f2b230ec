"""Writes the output of the ranks to log files and to the caller's streams. Read this module first.

    rank's process           output thread of the watcher's process                           where it arrives
    --------------           --------------------------------------                           ----------------
    stdout --- pipe ---.     output_thread.py  reads each pipe ------- bytes as they are ---> log file
    stderr --- pipe ---+---------> |                '---- stderr only: stderr_tail.py ------> report of a failure
               pipes.py            v
                             multiplexer.py    one rank: bytes as they are; several ranks: lines with prefixes
                                   |           (line_assembler.py makes one line of all updates of a progress bar)
                                   v
                             sinks.py ------------------------------------------------------> caller's sys.stdout and
                                                                                              sys.stderr, notebook cell

If the watcher does not read a stream, the rank writes the stream directly to a log file, to the caller's descriptor or to
/dev/null (StreamRoute in log_spec.py).

Owners:
    RankOutput (one for each watcher thread)  its OutputThread, if any stream goes over a pipe
    OutputThread                              the watcher's ends of the pipes, log files it writes, multiplexer, sinks
    Rank                                      the StdioFds of its rank, with the StderrTail

Guarantees:
    - No line is lost, as long as the caller's streams accept everything that is written to them.
    - A slow reader of the caller's stdout or stderr delays the output thread, and then the ranks. A slow reader never delays
      the watcher thread. The caller's thread waits for the reader only in `drain_all`, `drain_ended_ranks` and `close`.
    - When `drain_all` has returned True, all output that a rank wrote before it answered the call or died has arrived in the
      log files and the caller's streams.
    - No thread waits for end-of-file on a pipe, because a child process of a rank can keep the pipe open.
    - The use of memory is bounded, because bytes are written before more bytes are read.
"""

import os
import platform
import sys
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from mpwatch.options.log_spec import STREAMS, LogSpec, StreamRoute, in_notebook
from mpwatch.options.worker_info import Worker
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.output.multiplexer import OutputMultiplexer
from mpwatch.watcher.output.output_thread import OutputThread
from mpwatch.watcher.output.pipes import StdioFds, StdioOpener
from mpwatch.watcher.output.sinks import open_sink


class RankOutput:
    """The output of all ranks of one watcher thread.

    The watcher thread calls `open_stdio`, `end_rank` and `stop_when_drained`, and the caller's thread the others; but the
    watcher thread also calls `close`, if Python deletes a WorkerGroup that was not closed. In a job of several nodes,
    `nprocs` is not known at first.
    """

    def __init__(self, spec: LogSpec, nprocs: int | None, deferred_log: DeferredLog) -> None:
        self._spec = spec
        self._stdio_opener = StdioOpener(spec, platform.node())
        ranks = spec.representative_ranks() if nprocs is None else range(nprocs)
        self._shown_ranks = spec.count_shown_ranks(ranks)
        routes = {spec.route_of(stream, rank) for stream in STREAMS for rank in ranks}
        self._output_thread = OutputThread(deferred_log) if StreamRoute.PIPE in routes else None

    @property
    def is_read(self) -> bool:
        return self._output_thread is not None

    def use_current_streams(self) -> None:
        """At the begin of a call, choose the present sys.stdout and sys.stderr, which in a notebook belong to the cell."""
        thread = self._output_thread
        if thread is None or thread.is_over or not self._shown_ranks:
            return
        has_several_ranks = self._shown_ranks > 1
        is_line_mode = self._spec.prefix or (has_several_ranks and (self._spec.prefix is not None or not in_notebook()))
        targets = {stream: getattr(self._spec, stream) or getattr(sys, stream) for stream in STREAMS}
        coloured = {stream for stream, target in targets.items() if _shows_colours(target)}
        multiplexer = OutputMultiplexer(
            is_line_mode=bool(is_line_mode), has_several_ranks=has_several_ranks, coloured=coloured
        )
        stop_fd = thread.stop_waiting_for_reader.fileno()
        sinks = {stream: open_sink(target, stop_fd) for stream, target in targets.items()}
        thread.post(partial(thread.start_call, multiplexer, sinks))

    def open_stdio(self, worker: Worker, child_ends: ExitStack) -> StdioFds:
        """Raises LaunchError and OSError, and RuntimeError if the output thread cannot be started. See StdioOpener."""
        stdio = self._stdio_opener.open(worker, child_ends)
        if self._output_thread is not None:
            self._output_thread.post(partial(self._output_thread.add_pipes, stdio.pipes))
            self._output_thread.start()
        return stdio

    def end_rank(self, stdio: StdioFds, startup_output: bytes) -> None:
        """See OutputThread.end_pipes."""
        stdio.append_to_stderr_file(startup_output)
        if self._output_thread is not None:
            self._output_thread.post(partial(self._output_thread.end_pipes, stdio.pipes, startup_output))

    def hold(self, *, is_held: bool) -> None:
        """While a debugger's prompt is open. A rank that prints into a full pipe waits meanwhile. See OutputThread.hold."""
        if self._output_thread is not None and not self._output_thread.is_over:
            self._output_thread.post(partial(self._output_thread.hold, is_held))

    def drain_all(self, timeout: float | None, *, with_unfinished_lines: bool = True) -> bool:
        """See OutputThread.drain_all."""
        thread = self._output_thread
        return thread is None or thread.drain_all(timeout, with_unfinished_lines=with_unfinished_lines)

    def drain_ended_ranks(self, timeout: float | None) -> bool:
        """Do what `drain_all` does, but only for ranks that have ended."""
        return self._output_thread is None or self._output_thread.drain_ended_ranks(timeout)

    @property
    def is_reader_stalled(self) -> bool:
        """Whether the latest wait, in `drain_all` or in `drain_ended_ranks`, ended because `timeout` seconds had passed."""
        return self._output_thread is not None and self._output_thread.is_reader_stalled

    def stop_when_drained(self) -> None:
        """See OutputThread.stop_when_drained."""
        if self._output_thread is not None:
            self._output_thread.stop_when_drained()

    def close(self) -> None:
        if self._output_thread is not None:
            self._output_thread.close()


def _shows_colours(stream: Any) -> bool:
    """Whether the stream is a terminal with colours, and the user has not turned them off (https://no-color.org)."""
    with suppress(Exception):  # the calling program may have put any object there
        return bool(stream.isatty()) and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
    return False
