"""What the watcher saw, before anybody judges it: data, filled in by the loop and read by the diagnosis.

Times are of CLOCK_MONOTONIC, in seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from mpwatch.options.worker_info import Worker
from mpwatch.results.model import Progress
from mpwatch.watcher.machine.transitions import StopReason
from mpwatch.watcher.output.stderr_tail import StderrTail
from mpwatch.wire.messages import Message
from mpwatch.wire.shared_memory import HeartbeatSample


@dataclass
class RankObservations:
    """Of one rank."""

    worker: Worker
    stderr_tail: StderrTail = field(default_factory=StderrTail)
    """What is kept of its output."""
    pid: int | None = None
    was_ready: bool = False
    failing_at: float | None = None
    """When it said that its function had raised; what, is in the report."""
    report: Message | None = None
    heard_at: float | None = None
    """When that report came here, which is later."""
    details: bytes = b""
    """What of a reported exception can be pickled."""
    died_at: float | None = None
    exit_code: int | None = None
    """As multiprocessing has it, negative for a signal; None if it is not known."""
    oom: str = ""
    """The proof that the kernel's out-of-memory killer killed it."""
    likely_oom: str = ""
    """What makes that likely, where it cannot be proved."""
    stacks: str = ""
    """Where its threads were just before it was told to stop, in faulthandler's words, with lines of source."""
    crash: str = ""
    """The Python stack at the moment of a crash, the same way."""
    printed: str = ""
    """What its interpreter printed instead of becoming ready."""
    stderr: str = ""
    """The last lines of its stderr, if that was captured."""
    was_asked: bool = False
    """Whether it was sent DUMP_SIGNAL: a program that it becomes in that moment dies of it."""
    process_state: str = ""
    """The letter of its state when its stacks were asked for, see proc(5)."""
    heartbeat: HeartbeatSample = field(default_factory=partial(HeartbeatSample, None, None))
    """When it was last heard of, and what it last reported."""
    signals_sent: set[int] = field(default_factory=set)
    signalled_at: float = 0.0
    """When the first of them was sent."""

    def progress(self, started_at: float) -> Progress | None:
        """What it last reported, in a run that was started at this time."""
        if self.heartbeat.report is None:
            return None
        at, step, total, metrics = self.heartbeat.report
        return Progress(step=step, total=total, metrics=metrics, elapsed=at - started_at)


@dataclass(frozen=True)
class AttemptObservations:
    """Of ranks that were started together, from then on; or of a call of ranks that stay."""

    ranks: Mapping[int, RankObservations]
    hostname: str
    started_at: float
    stopped_at: float | None
    verdict: StopReason | None
    never_ready: Iterable[int] = ()
    silent: Mapping[int, float] = field(default_factory=dict)
    """Ranks that were silent for longer than they might, with the time of the last beat."""
    timeout: float | None = None
    heartbeat_timeout: float | None = None
    start_timeout: float = 0.0
    signum: int | None = None
    log_dir: str = ""
    helpers_oom: str = ""
    """What shows that the out-of-memory killer struck, if it was none of the ranks."""

    began_at: float = 0.0
    """When they were started; `started_at` is when the run was."""
    all_ready_at: float | None = None
    ended_at: float = 0.0

    @property
    def attempt(self) -> int:
        """How often these ranks had been started before."""
        return next(iter(self.ranks.values())).worker.restart_count

    @property
    def healthy_seconds(self) -> float:
        """From when all of them were ready, to the failure."""
        return 0.0 if self.all_ready_at is None or self.stopped_at is None else self.stopped_at - self.all_ready_at

    def collect_stderr(self) -> None:
        """What the ranks have printed by now, in the end."""
        for observed in self.ranks.values():
            observed.stderr = observed.stderr_tail.last_lines()

    def forget(self) -> None:
        """What the ranks have sent, which may be large: who watched them, and has it, goes with the garbage some time. That
        they did, and when, is still to be shown.
        """
        for observed in self.ranks.values():
            if observed.report is not None:
                observed.report = Message(observed.report.kind, observed.report.stamp, b"")
