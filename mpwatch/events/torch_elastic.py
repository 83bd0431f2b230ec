"""`TorchElasticEvents`: tells torch.distributed.elastic's handlers of events and of metrics what they know from its agent.

Runs in the caller's thread; imports torch when it is made.
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
from mpwatch.results.model import ProcessFailure, WorkerState
from mpwatch.results.report import failure_text

WORKER_STATES: Mapping[type[Event], str] = {
    WorkerSucceeded: "SUCCEEDED",
    WorkerFailed: "FAILED",
    WorkerStopped: "TERMINATED",
}
RENDEZVOUS = "static"  # what torch calls it where all is known from the start: on one machine


@dataclass
class _RunState:
    """What is known of a run that goes on."""

    started: RunStarted
    met: RendezvousCompleted | None = None
    """In a job of several nodes: who its ranks here are, from the latest attempt on."""
    restarts: int = 0
    restarts_left: dict[int, int] = field(default_factory=dict)
    """By rank, of those that were restarted."""
    pids: dict[int, int] = field(default_factory=dict)
    answers: dict[int, Event] = field(default_factory=dict)
    """By rank: the last thing that became of its function, in its present life."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of this node; none until the nodes have met."""
        return self.started.ranks if self.met is None else self.met.ranks

    def meet(self, event: RendezvousCompleted) -> None:
        """Nothing is known of these ranks, even if others had the same numbers; but how often it may be tried again."""
        left = self.remaining
        self.met = event
        self.restarts_left = dict.fromkeys(event.ranks, left)
        self.pids.clear()
        self.answers.clear()

    @property
    def remaining(self) -> int:
        """Restarts: of the group, or of the rank that has the fewest."""
        return min(self.restarts_left.values(), default=self.started.max_restarts)


class TorchElasticEvents:
    """Records events and metrics as torch's elastic agent does, for handlers that were written for it.

    For the `on_event` of `mpwatch.run` and `WorkerGroup`; one may observe several, at once too. Events
    (`torch.distributed.elastic.events`) go to the handler that is registered as `event_log_handler`:

    - `torchelastic.worker.status.START` for each start of a rank; at the end of the run SUCCEEDED, FAILED or TERMINATED for
      each rank. As with torch's agent, nothing is said of the ranks of an attempt that is followed by another: FAILED is
      final.
    - With source AGENT, at the end: FAILED if the run was interrupted, or failed though no rank did, or only some of other
      nodes. Otherwise SUCCEEDED, also after ranks have failed: it is not about them but, as with torch's agent, about who
      watched them.

    In a job of several nodes each tells of its own ranks; `run_id`, `rdzv_backend`, and who they are, are then the job's.

    Metrics (`torch.distributed.elastic.metrics`, group "torchelastic") are named `workers.<role>.`: the state of the group
    and `remaining_restarts` at each change, `failed` also for an attempt that is followed by another (but for one that ends
    since other nodes have come, which is no retry, as with torch's agent); and at the end, unless the run was interrupted,
    `run_total`, `run_(success|failed)_(with|no)_retries` and `flakiness`.

    Raises ImportError if there is no torch, and ValueError if there is no such handler.
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
                "TorchElasticEvents hands events to torch.distributed.elastic, which cannot be imported here: "
                f"{error}. Install torch, or observe the run by JsonLines or a function of your own."
            ) from error
        try:
            get_logging_handler(event_log_handler)
        except KeyError:
            raise ValueError(
                "event_log_handler must be registered in torch.distributed.elastic.events.handlers, as 'null' and "
                f"'console' are, and {event_log_handler!r} is not"
            ) from None
        self._destination = event_log_handler
        self._event, self._source, self._record, self._put_metric = TorchEvent, EventSource, record, put_metric
        self._runs: dict[str, _RunState] = {}

    def __call__(self, event: Event) -> None:
        """Tell of this event what torch's agent would have."""
        if isinstance(event, RunStarted):
            self._runs[event.run_id] = _RunState(event)
        run = self._runs.get(event.run_id)
        if run is None:  # not observed from its start
            return
        match event:
            case WorkerStarted():
                run.pids.update(dict.fromkeys(event.ranks, event.pid))
                for rank in event.ranks:
                    self._say(run, event, "START", rank)
            case WorkerSucceeded() | WorkerFailed() | WorkerStopped():
                run.answers.update(dict.fromkeys(event.ranks, event))
            case StateChanged():
                self._measure_state(run, event.after.name)
            case RendezvousCompleted():
                run.meet(event)
            case Restarting():
                if not event.reason:  # else nothing has failed
                    self._measure_state(run, WorkerState.FAILED.name)
                    run.restarts += 1
                for rank in event.ranks:
                    run.restarts_left[rank] = event.restarts_left
                    run.answers.pop(rank, None)
            case RunEnded():
                del self._runs[event.run_id]
                self._end(run, event)
            case _:
                pass

    def _end(self, run: _RunState, event: RunEnded) -> None:
        was_closed = event.state is WorkerState.STOPPED and not event.reason  # a WorkerGroup, as it should be
        has_failed = event.state is WorkerState.FAILED
        if event.state is not WorkerState.STOPPED or was_closed:
            self._measure_run(run, has_failed)
        for rank in run.ranks:
            answer = run.answers.get(rank)
            self._say(run, event, WORKER_STATES[type(answer)] if answer is not None else "TERMINATED", rank, answer=answer)
        no_rank_failed = not any(isinstance(answer, WorkerFailed) for answer in run.answers.values())
        if (has_failed and no_rank_failed) or (event.state is WorkerState.STOPPED and not was_closed):
            self._say(run, event, "FAILED", raw_error=event.reason)
        else:
            self._say(run, event, "SUCCEEDED")

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

    def _say(
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
    """What torch's agent puts into "metadata", a JSON text; each number of a rank in a list of its own, as there."""
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
    """As the error file of a rank under torch's agent; for a rank that did not raise, too."""
    failure = failed.failure
    return json.dumps(
        {
            "message": {
                "message": failure.summary or failure_text(failure),
                "extraInfo": {"py_callstack": failure.traceback or failure.stack, "timestamp": str(int(failed.time))},
            }
        }
    )
