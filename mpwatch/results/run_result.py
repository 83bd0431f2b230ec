"""`RunResult` is what `mpwatch.run` returns.

RunResult is a subclass of `RunData` of model.py. In addition to the attributes of RunData, RunResult has the attribute
`events`, and methods such as `to_html`. This module imports report.py and html.py, and these two modules import RunData.
RunData and RunResult are two classes, because a single class would need circular imports.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import TypeVar

from mpwatch.events.types import Event
from mpwatch.results.failure import describe_failure
from mpwatch.results.field_docs import add_inherited_attributes
from mpwatch.results.model import RunData, WorkerState
from mpwatch.results.report import format_count

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class RunResult(RunData[T]):
    """The outcome of a run. A RunResult is a sequence of the ranks' return values, with attributes such as `failures`.

    The value of rank 3 is `result[3]`. Iteration yields the values in the order of ranks.

    Attributes:
        events: the latest 100,000 events of the run, in the order in which the watcher noticed them. It is always empty for
            a call of a WorkerGroup. Use the option `on_event` of the group instead.
    """

    events: tuple[Event, ...] = ()

    def to_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the timeline of the run to a file for Perfetto (ui.perfetto.dev) and chrome://tracing.

        In the timeline, each rank has a lane with its processes, calls, last heartbeat, last report, failures and restarts.

        Raises:
            OSError: the file cannot be written.
            ValueError: the result has no events, because it is the result of a WorkerGroup's call. Use the option `on_event`
                of the group.
        """
        from mpwatch.events.chrome_trace import write_chrome_trace  # imported on use, as most runs need neither

        write_chrome_trace(self.events, path)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write an HTML file that shows the result in the same way as a notebook, but with more details.

        The HTML file has the table, the timeline of the ranks, the traceback of the root cause, the stacks of the other
        ranks and the whole report. You can attach the HTML file to a ticket, because it needs no other file and no network.

        Args:
            path: the path of the file. An existing file is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        from mpwatch.events.timeline_svg import draw_timelines
        from mpwatch.results.html import make_result_page

        page = make_result_page(self, draw_timelines(self.events))
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)

    def __getitem__(self, rank: int) -> T:
        try:
            return self.return_values[rank]
        except KeyError:
            raise IndexError(self._why_missing(rank)) from None

    def __iter__(self) -> Iterator[T]:
        return (self.return_values[rank] for rank in sorted(self.return_values))

    def __len__(self) -> int:
        return len(self.return_values)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows for this result."""
        from mpwatch.events.timeline_svg import draw_timelines
        from mpwatch.results.html import make_result_table

        return make_result_table(self, draw_timelines(self.events))

    def __repr__(self) -> str:
        ranks, failures = format_count(len(self.workers), "rank"), format_count(len(self.failures), "failure")
        return f"<RunResult {self.state.name}: {ranks}, {failures}>"

    def _why_missing(self, rank: int) -> str:
        if self.state is WorkerState.SUCCEEDED:
            return f"no rank {rank} in this run; it had the ranks {sorted(self.return_values)}"
        if self.keep_going and rank in self.failures:
            return f"rank {rank} has no value, since it failed: {describe_failure(self.failures[rank])}"
        return f"rank {rank} has no value, since the run ended as {self.state.name}; see .failures"


add_inherited_attributes(RunResult, RunData)
