"""`TorchElasticEvents` is an observer that records events and metrics through the handlers of torch.distributed.elastic.

The constructor of `TorchElasticEvents` imports torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpwatch.events.types import (
    Event,
    RendezvousCompleted,
    Restarting,
    RunEnded,
    RunStarted,
    StateChanged,
    WorkerFailed,
    WorkerStarted,
    WorkerStopped,
    WorkerSucceeded,
)
from mpwatch.results.failure import ProcessFailure
from mpwatch.results.model import WorkerState

WORKER_STATES: Mapping[type[Event], str] = {
    WorkerSucceeded: "SUCCEEDED",
    WorkerFailed: "FAILED",
    WorkerStopped: "TERMINATED",
}
RENDEZVOUS = "static"  # torch's name for a rendezvous with known members, such as the rendezvous of one machine


@dataclass
class _RunState:
    """What TorchElasticEvents knows about a run that has not ended."""

    started: RunStarted
    met: RendezvousCompleted | None = None
    """The latest rendezvous of a job of several nodes. None before the first rendezvous, and on a single node."""
    restarts: int = 0
    restarts_left: dict[int, int] = field(default_factory=dict)
    """The number of restarts left, by rank. A rank without an entry was not restarted."""
    pids: dict[int, int] = field(default_factory=dict)
    answers: dict[int, Event] = field(default_factory=dict)
    """The outcome of the function in the current attempt, by rank."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this node. In a job of several nodes, `ranks` is empty before the first rendezvous."""
        return self.started.ranks if self.met is None else self.met.ranks

    def meet(self, event: RendezvousCompleted) -> None:
        """Replace the ranks of the last attempt by the ranks of the new attempt.

        The number of remaining restarts stays the same.
        """
        left = self.remaining
        self.met = event
        self.restarts_left = dict.fromkeys(event.ranks, left)
        self.pids.clear()
        self.answers.clear()

    @property
    def remaining(self) -> int:
        """The number of remaining restarts.

        With scope="worker", each rank has its own number of remaining restarts, and `remaining` is the smallest of these
        numbers.
        """
        return min(self.restarts_left.values(), default=self.started.max_restarts)


class TorchElasticEvents:
    """Record the same events and metrics as torch's elastic agent, so that handlers for torch's agent also work here.

    Pass an instance of TorchElasticEvents as `on_event` to `mpwatch.run` or `WorkerGroup`. One instance can observe several
    runs at the same time.

    Events (`torch.distributed.elastic.events`) go to the registered handler that `event_log_handler` names:

    - `torchelastic.worker.status.START` is recorded for each start of a rank.
    - An event SUCCEEDED, FAILED or TERMINATED is recorded for each rank at the end of the run. If a rank fails and mpwatch
      restarts the rank, no event is recorded for this failure.
    - At the end of the run, one event with source AGENT is recorded. In torch, the AGENT event describes the agent. In
      mpwatch, the AGENT event describes the watcher. The AGENT event is FAILED in two cases: the run was interrupted, or the
      run failed although no rank of this node failed. If the run succeeds, or a WorkerGroup is closed, the AGENT event is
      SUCCEEDED. If the run fails because a rank of this node has failed, the event of this rank is FAILED. As in torch, the
      failure of a rank does not make the AGENT event FAILED, because the agent itself has not failed.

    In a job of several nodes, each node records the events of its own ranks. The events of a job have the `run_id` and the
    `rdzv_backend` of the job.

    Metrics (`torch.distributed.elastic.metrics`, group "torchelastic") have names that begin with `workers.<role>.`:

    - When the state of the run changes, two metrics are recorded: one with the name of the new state, such as `healthy`, and
      `remaining_restarts`. When ranks are restarted after a failure, the metrics `failed` and `remaining_restarts` are
      recorded. If ranks are restarted because a node joins, the metric `failed` is not recorded.
    - At the end of a run that was not interrupted, six metrics are recorded: `run_total`, `flakiness`,
      `run_success_no_retries`, `run_success_with_retries`, `run_failed_no_retries` and `run_failed_with_retries`.

    Args:
        event_log_handler: name of a handler in torch.distributed.elastic.events.handlers, such as "null" or "console".

    Raises:
        ImportError: torch cannot be imported.
        ValueError: the handler is not registered.
    """

    def __init__(self, event_log_handler: str = "null") -> None:
        try:
            from torch.distributed.elastic.events import record
            from torch.distributed.elastic.events.api import Event as TorchEvent
            from torch.distributed.elastic.events.api import EventSource
            from torch.distributed.elastic.events.handlers import get_logging_handler
            from torch.distributed.elastic.metrics.api import put_metric
        except ImportError as error:
            raise ImportError(
                "TorchElasticEvents needs torch.distributed.elastic, which cannot be imported here: "
                f"{error}. Install torch, or use JsonLines or a function of your own as observer."
            ) from error
        try:
            get_logging_handler(event_log_handler)
        except KeyError:
            raise ValueError(
                f"event_log_handler {event_log_handler!r} is not registered in torch.distributed.elastic.events.handlers; "
                "register it, or use 'null' or 'console'"
            ) from None
        self._destination = event_log_handler
        self._event, self._source, self._record, self._put_metric = TorchEvent, EventSource, record, put_metric
        self._runs: dict[str, _RunState] = {}

    def __call__(self, event: Event) -> None:
        """Record the events and metrics that torch's agent would record for this event."""
        if isinstance(event, RunStarted):
            self._runs[event.run_id] = _RunState(event)
        run = self._runs.get(event.run_id)
        if run is None:  # this observer did not get the event of the run's start
            return
        match event:
            case WorkerStarted():
                run.pids.update(dict.fromkeys(event.ranks, event.pid))
                for rank in event.ranks:
                    self._record_event(run, event, "START", rank)
            case WorkerSucceeded() | WorkerFailed() | WorkerStopped():
                run.answers.update(dict.fromkeys(event.ranks, event))
            case StateChanged():
                self._measure_state(run, event.after.name)
            case RendezvousCompleted():
                run.meet(event)
            case Restarting():
                if not event.reason:  # if there is a reason, no rank has failed
                    self._measure_state(run, WorkerState.FAILED.name)
                run.restarts += event.is_counted
                for rank in event.ranks:
                    run.restarts_left[rank] = event.restarts_left
                    run.answers.pop(rank, None)
            case RunEnded():
                del self._runs[event.run_id]
                self._end(run, event)
            case _:
                pass

    def _end(self, run: _RunState, event: RunEnded) -> None:
        was_closed = event.state is WorkerState.STOPPED and not event.reason  # the normal end of a WorkerGroup
        has_failed = event.state is WorkerState.FAILED
        if event.state is not WorkerState.STOPPED or was_closed:
            self._measure_run(run, has_failed)
        for rank in run.ranks:
            answer = run.answers.get(rank)
            self._record_event(
                run, event, WORKER_STATES[type(answer)] if answer is not None else "TERMINATED", rank, answer=answer
            )
        no_rank_failed = not any(isinstance(answer, WorkerFailed) for answer in run.answers.values())
        if (has_failed and no_rank_failed) or (event.state is WorkerState.STOPPED and not was_closed):
            self._record_event(run, event, "FAILED", raw_error=event.reason)
        else:
            self._record_event(run, event, "SUCCEEDED")

    def _measure_state(self, run: _RunState, state: str) -> None:
        self._measure(run, {"remaining_restarts": run.remaining, state.lower(): 1})

    def _measure_run(self, run: _RunState, has_failed: bool) -> None:
        limit, again = run.started.max_restarts, run.restarts > 0
        self._measure(
            run,
            {
                "flakiness": int(100.0 if has_failed else 100.0 - 100.0 * (run.remaining + 1) / (limit + 1)),
                "run_total": 1,
                "run_success_with_retries": int(again and not has_failed),
                "run_success_no_retries": int(not again and not has_failed),
                "run_failed_with_retries": int(again and has_failed),
                "run_failed_no_retries": int(not again and has_failed),
            },
        )

    def _measure(self, run: _RunState, numbers: dict[str, int]) -> None:
        for name, number in numbers.items():
            self._put_metric(f"workers.{run.started.role}.{name}", number)

    def _record_event(
        self,
        run: _RunState,
        event: Event,
        state: str,
        rank: int | None = None,
        *,
        answer: Event | None = None,
        raw_error: str | None = None,
    ) -> None:
        failed = answer if isinstance(answer, WorkerFailed) else None
        pid = None if rank is None else run.pids.get(rank)
        metadata: dict[str, str | int | float | bool | None] = {
            "run_id": event.run_id if run.met is None else run.met.job,
            "global_rank": rank,
            "group_rank": 0 if run.met is None else run.met.group_rank,
            "worker_id": None if pid is None else str(pid),
            "role": run.started.role,
            "hostname": run.started.hostname,
            "state": state,
            "total_run_time": int(event.monotonic - run.started.monotonic),
            "rdzv_backend": RENDEZVOUS if run.met is None else run.met.backend,
            "raw_error": raw_error if failed is None else _raw_error(failed),
            "metadata": json.dumps(_details(run, rank, None if failed is None else failed.failure)),
            "agent_restarts": run.restarts,
            "duration_ms": None,
        }
        source = self._source.AGENT if rank is None else self._source.WORKER
        self._record(
            self._event(f"torchelastic.worker.status.{state}", source, int(event.time * 1000), metadata), self._destination
        )


def _details(run: _RunState, rank: int | None, failure: ProcessFailure | None) -> dict[str, Any]:
    """Return the data for the field "metadata" of a torch event.

    As in the events of torch's agent, each value that belongs to a rank is in a list, for example `"local_rank": [0]`.
    """
    met = run.met
    nodes, role_size, first = (
        (1, run.started.nprocs, 0) if met is None else (met.group_world_size, met.role_world_size, met.role_rank)
    )
    details: dict[str, Any] = {"group_world_size": nodes, "entry_point": run.started.fn}
    if rank is not None:
        local_rank = run.ranks.index(rank)
        details |= {"local_rank": [local_rank], "role_rank": [first + local_rank], "role_world_size": [role_size]}
        details |= {"exit_code": [None], "worker_pid": [None]}
    if failure is not None:
        code = failure.exit_code if failure.signal is None else -failure.signal
        details |= {"exit_code": [code], "worker_pid": [failure.pid]}
    return details


def _raw_error(failed: WorkerFailed) -> str:
    """Return the failure of a rank as JSON, in the format of torch's error files."""
    failure = failed.failure
    return json.dumps(
        {
            "message": {
                "message": failure.summary if failure.exception else str(failure),
                "extraInfo": {"py_callstack": failure.traceback or failure.stack, "timestamp": str(int(failed.time))},
            }
        }
    )
