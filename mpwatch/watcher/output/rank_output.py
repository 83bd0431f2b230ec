"""What the ranks write to their stdout and stderr, on its way to files and to the caller.

    rank --- pipe ---> pump: read what there is ---> the stream's file, byte by byte
                                               '---> mixer.py ---> sinks.py: the caller's stdout or stderr
    rank --- file, if nobody is to see it meanwhile

The pump is a thread of its own. Guarantees: no line is lost as long as who reads takes it; a reader that is slow holds up
the pump, then the ranks, and nobody else: neither the thread that watches them nor, but in `settle`, the caller's. What a
rank wrote before it died or answered is there when `settle` has returned. The end of a stream is never waited for, since a
helper of the rank may keep it open. Memory is bounded: what was read is written before more is read.
"""

import platform
import sys
from contextlib import ExitStack
from functools import partial

from mpwatch.options.log_spec import STREAMS, LogSpec, StreamRoute, in_notebook
from mpwatch.options.worker_info import Worker
from mpwatch.watcher.observers.deferred_log import DeferredLog
from mpwatch.watcher.output.multiplexer import OutputMultiplexer
from mpwatch.watcher.output.output_thread import OutputThread
from mpwatch.watcher.output.pipes import StdioFds, StdioOpener
from mpwatch.watcher.output.sinks import sink_of


class RankOutput:
    """Of the ranks of one life. Made, attached, settled and closed by the caller's threads; the rest is the watching one's.

    Args:
        spec: where their output goes.
        nprocs: how many ranks there are; None if that is not known yet.
        remarks: where it is noted that something cannot be written.
    """

    def __init__(self, spec: LogSpec, nprocs: int | None, deferred_log: DeferredLog) -> None:
        self._spec = spec
        self._opener = StdioOpener(spec, platform.node())
        ranks = spec.telling_ranks() if nprocs is None else range(nprocs)
        self._speakers = spec.shown_ranks(ranks)
        ways = {spec.way_of(stream, rank) for stream in STREAMS for rank in ranks}
        self._pump = OutputThread(deferred_log) if StreamRoute.PIPE in ways else None

    def attach(self) -> None:
        """What ranks write from now on goes to what are sys.stdout and sys.stderr now; in a notebook, to this cell."""
        if self._pump is None or self._pump.is_over or not self._speakers:
            return
        may_be_mixed = self._speakers > 1
        is_mixed = self._spec.prefix or (may_be_mixed and (self._spec.prefix is not None or not in_notebook()))
        multiplexer = OutputMultiplexer(is_mixed=bool(is_mixed), may_be_mixed=may_be_mixed)
        sinks = {stream: sink_of(getattr(sys, stream), self._pump.stop_waiting_for_reader.fileno()) for stream in STREAMS}
        self._pump.post(partial(self._pump.attach, multiplexer, sinks))

    def open(self, worker: Worker, passed: ExitStack) -> StdioFds:
        """The streams of a rank that is about to be started. `passed` closes its ends here. Raises LaunchError, OSError and,
        if there can be no thread, RuntimeError.
        """
        stdio = self._opener.open(worker, passed)
        if self._pump is not None:
            self._pump.post(partial(self._pump.add, stdio.sources))
            self._pump.begin()
        return stdio

    def end(self, stdio: StdioFds, unsaid: bytes) -> None:
        """That rank is dead, with all that it had started in its process group; this has yet to be written to its stderr."""
        stdio.leave(unsaid)
        if self._pump is not None:
            self._pump.post(partial(self._pump.end, stdio.sources, unsaid))

    def settle(self, seconds: float | None) -> bool:
        """Wait until all that has been written by now is where it belongs. False if it did not come to that in time."""
        return self._pump is None or self._pump.settle(seconds)

    def catch_up(self, seconds: float | None) -> bool:
        """The same of ranks that have ended; others are not disturbed."""
        return self._pump is None or self._pump.catch_up(seconds)

    @property
    def is_stuck(self) -> bool:
        """Whether who reads was waited for in vain the last time."""
        return self._pump is not None and self._pump.is_stuck

    def finish(self) -> None:
        """All ranks are dead, and no more will be started."""
        if self._pump is not None:
            self._pump.finish()

    def close(self) -> None:
        """All ranks are dead, or never lived."""
        if self._pump is not None:
            self._pump.close()
