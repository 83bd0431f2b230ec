"""`RunResult` is what `mpwatch.run` returns.

RunResult is a subclass of `RunData` of model.py. In addition to the attributes of RunData, RunResult has the attribute
`events`, and methods such as `to_html`. This module imports report.py and html.py, and these two modules import RunData.
RunData and RunResult are two classes, because a single class would need circular imports.
"""

from collections.abc import Callable, ItemsView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from os import PathLike
from typing import Any, SupportsIndex, TypeVar, overload

from mpwatch.events.types import Event
from mpwatch.results.field_docs import add_inherited_attributes
from mpwatch.results.model import RunData, WorkerState
from mpwatch.results.report import describe_fate, format_count, format_fates, format_verdict
from mpwatch.wire.exceptions.decoder import ENDS_RUN
from mpwatch.wire.pickling import return_values

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class RunResult(RunData[T], Sequence[T]):
    """The outcome of a run. A RunResult is a sequence of the ranks' return values, with attributes such as `failures`.

    The index is the global rank: `result[3]` is the value of rank 3, `result[-1]` is the value of the last rank, and
    `len(result)` is the world size. A rank has no value here if it has failed or was stopped, if a call of a WorkerGroup did
    not call it, or if it belongs to another node, whose own result has the value. Then `result[rank]` raises LookupError,
    with a text that says what happened to the rank. Iteration and slices that reach this rank raise it, too. `values()` and
    `items()` have only the values that exist.

    If the run has not succeeded, its result can always be pickled, without the values that cannot be pickled or unpickled.

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

    @property
    def verdict(self) -> str:
        """The first line of the report: which rank failed first and why, or what else ended the run, such as the timeout.

        It is empty if the run succeeded.
        """
        return format_verdict(self)

    @property
    def fates(self) -> list[str]:
        """The lines of the report about all ranks except the rank that failed first.

        Several ranks can share a line, for example `ranks 0-1: stopped by the watcher …`.
        """
        return format_fates(self)

    def values(self) -> ValuesView[T]:
        """The return values that exist, in the order of ranks."""
        return self.return_values.values()

    def items(self) -> ItemsView[int, T]:
        """The pairs of global rank and return value, for the values that exist, in the order of ranks."""
        return self.return_values.items()

    @overload
    def __getitem__(self, rank: SupportsIndex) -> T: ...

    @overload
    def __getitem__(self, rank: slice) -> list[T]: ...

    def __getitem__(self, rank: SupportsIndex | slice) -> T | list[T]:
        ranks = range(len(self))
        if isinstance(rank, slice):
            return [self._get_value(each) for each in ranks[rank]]
        try:
            number = ranks[rank]
        except IndexError:
            raise IndexError(f"there is no rank {rank}; the number of ranks is {len(ranks)}") from None
        return self._get_value(number)

    def __len__(self) -> int:
        return self.workers[0].world_size if self.workers else max(self.worker_states, default=-1) + 1

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.state is not WorkerState.SUCCEEDED:  # the failures must arrive, whatever the values are
            state["return_values"] = _convert(self.return_values, return_values.dumps)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["state"] is not WorkerState.SUCCEEDED:
            state = {**state, "return_values": _convert(state["return_values"], return_values.loads)}
        self.__dict__.update(state)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows for this result."""
        from mpwatch.events.timeline_svg import draw_timelines
        from mpwatch.results.html import make_result_table

        return make_result_table(self, draw_timelines(self.events))

    def __repr__(self) -> str:
        ranks, failures = format_count(len(self.workers), "rank"), format_count(len(self.failures), "failure")
        return f"<RunResult {self.state.name}: {ranks}, {failures}>"

    def _get_value(self, rank: int) -> T:
        if rank in self.return_values:
            return self.return_values[rank]
        failure = self.failures.get(rank)
        why = "this call has not called it"
        if self.worker_states.get(rank) is WorkerState.SUCCEEDED:
            why = "it had returned, but its value could not be pickled or rebuilt"
        elif rank in self.worker_states:
            why = describe_fate(self, rank)
        elif self.workers and self.workers[0].group_world_size > 1:
            why = "it belongs to another node, where the result has its value"
        text = f"rank {rank} has no value: {why}; .values() and .items() have the values that exist"
        # not IndexError, at which an iteration would end without a word
        raise LookupError(text) from (failure.exception if failure else None)


def _convert(values: Mapping[int, Any], convert: Callable[[Any], Any]) -> dict[int, Any]:
    """Pickle or unpickle each value. Leave out a value for which this raises an exception."""
    converted = {}
    for rank, value in values.items():
        try:
            converted[rank] = convert(value)
        except ENDS_RUN:
            raise
        except BaseException:  # noqa: BLE001, S110  from the code of the value's class
            pass
    return converted


add_inherited_attributes(RunResult, RunData)
