"""What the watcher observed of an attempt and of each of its ranks. Data only.

The watcher thread writes it. When the attempt has ended, the caller's thread reads it. All times are seconds of
CLOCK_MONOTONIC.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from mpwatch.options.worker_info import Worker
from mpwatch.results.model import Progress
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.collective_verdict import CollectiveVerdict
from mpwatch.watcher.machine.transitions import InterruptCause, StopReason
from mpwatch.watcher.output.stderr_tail import StderrTail
from mpwatch.wire.messages import Message
from mpwatch.wire.shared_memory import HeartbeatSample


@dataclass
class RankObservations:
    """What the watcher observed of one rank, during one attempt or one call."""

    worker: Worker
    stderr_tail: StderrTail = field(default_factory=StderrTail)  # keeps the last lines of the rank's stderr
    pid: int | None = None
    was_ready: bool = False
    raised_at: float | None = None
    """When the rank's function raised, from the rank's FAILING message. The exception itself is in `answer`."""
    answer: Message | None = None  # the message RETURNED, RAISED or LOAD_FAILED
    answer_received_at: float | None = None
    """When the watcher received `answer`. This time is later than the time stamp of the message."""
    details: bytes = b""
    """The pickled parts of a reported exception."""
    local_variables: bytes = b""
    """The texts of local variables, with debug="locals"."""
    died_at: float | None = None
    """When the rank died. It is set as soon as the watcher sees that the rank is dying (death_order.py)."""
    has_exited: bool = False  # whether the watcher has noticed the end of the rank's process
    exit_code: int | None = None
    """The exit code as in multiprocessing: negative after a signal, and None if the exit code is unknown."""
    oom_proof: str = ""
    """Text that proves that the kernel's out-of-memory killer killed the rank."""
    oom_hint: str = ""
    """Text that makes the out-of-memory killer a likely cause, if there is no proof."""
    stacks: str = ""
    """The stacks of all threads just before the watcher stopped the rank, in faulthandler's format, with source lines."""
    crash_stack: str = ""
    """The Python stack at the moment of a crash, in the same format."""
    startup_output: str = ""
    """What the interpreter printed, if the rank never became ready."""
    stderr: str = ""
    """The last lines of the rank's stderr, if the watcher reads it."""
    was_asked_for_stacks: bool = False  # by a signal, which kills the rank if it executes another program at that moment
    is_dump_for_report: bool = False
    """Whether the watcher asked for stacks because it stops the rank, not only for `stacks()` or Ctrl-Backslash."""
    collectives: RankCollectives | None = None
    """The rank's latest collectives at the first sign of a failure, or when the rank raised. None if the rank was not asked
    or did not answer."""
    collectives_at: float = 0.0  # when `collectives` was read
    wants_collectives: bool = False  # whether the rank's next answer must be stored in `collectives`
    process_state: str = ""
    """The letter of the process state when the watcher asked for stacks, see proc(5)."""
    heartbeat: HeartbeatSample = field(default_factory=partial(HeartbeatSample, None, None))
    """The last heartbeat and the last `mpwatch.report()`."""
    stopped_step: int | None = None  # the step at which `should_stop` has returned True in the rank, or None if it has not
    signals_sent: set[int] = field(default_factory=set)  # the signals that the watcher sent to the rank
    first_signal_at: float = 0.0  # when the watcher sent the first signal to the rank

    def add_collectives(self, answer: RankCollectives) -> None:
        """Keep the earlier answer if this one has no new call: once a collective has failed, its source line is lost."""
        if self.collectives is None or answer.has_call_after(self.collectives):
            self.collectives = answer

    def get_progress(self, run_started_at: float) -> Progress | None:
        """Return the rank's last `mpwatch.report()`, with its time in seconds since the start of the run."""
        if self.heartbeat.report is None:
            return None
        at, step, total, metrics = self.heartbeat.report
        return Progress(step=step, total=total, metrics=metrics, elapsed=at - run_started_at)


@dataclass(frozen=True)
class AttemptObservations:
    """What the watcher observed of one Call."""

    ranks: Mapping[int, RankObservations]
    hostname: str
    run_started_at: float
    """When the run began. `attempt_started_at` is when these ranks were started."""
    stopped_at: float | None  # when the watcher began to stop the ranks
    stop_reason: StopReason | None
    never_ready: Iterable[int] = ()  # ranks that were not ready within `start_timeout`
    silent_ranks: Mapping[int, float] = field(default_factory=dict)
    """Ranks that sent no heartbeat within `heartbeat_timeout`, each with the time of its last heartbeat."""
    timeout: float | None = None
    heartbeat_timeout: float | None = None
    start_timeout: float = 0.0
    signum: int | None = None
    """The signal that stopped the run. If another cause stopped the run, `signum` is a signal with the same effect."""
    interrupt_cause: InterruptCause = InterruptCause.SIGNAL  # why the run was stopped, if there is a `signum`
    stop_cause: str = ""
    """What has asked the ranks to save and return. The text is empty if no stop was requested."""
    stop_timeout: float | None = None
    """The time limit for the ranks to return after a stop request, or None if the ranks have not exceeded the limit."""
    log_dir: str = ""
    collective_verdict: CollectiveVerdict | None = None  # the verdict on the ranks' collectives that has ended the attempt
    helpers_oom: str = ""
    """Text that shows that the out-of-memory killer killed processes other than the ranks."""
    attempt_started_at: float = 0.0
    all_ready_at: float | None = None  # when the last rank became ready
    ended_at: float = 0.0

    @property
    def attempt(self) -> int:
        """The number of this attempt. The first attempt has the number 0."""
        return next(iter(self.ranks.values())).worker.restart_count

    @property
    def healthy_seconds(self) -> float:
        return 0.0 if self.all_ready_at is None or self.stopped_at is None else self.stopped_at - self.all_ready_at

    @property
    def unused_heartbeat_timeout(self) -> float | None:
        """The value of `heartbeat_timeout` if no rank has called `heartbeat()` or `report()`, else None."""
        beats = (observed.heartbeat.beat_at for observed in self.ranks.values())
        return self.heartbeat_timeout if all(beat_at is None for beat_at in beats) else None

    def collect_stderr(self) -> None:
        for observed in self.ranks.values():
            observed.stderr = observed.stderr_tail.last_lines()

    def drop_payloads(self) -> None:
        """Delete the return values and exceptions, which can be large. The live view needs their kinds and times."""
        for observed in self.ranks.values():
            if observed.answer is not None:
                observed.answer = Message(observed.answer.kind, observed.answer.stamp, b"")
