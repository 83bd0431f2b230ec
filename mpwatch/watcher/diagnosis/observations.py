"""What the watcher observed of an attempt and of each of its ranks. Data only.

The watcher thread writes it. When the attempt has ended, the caller's thread reads it. All times are seconds of
CLOCK_MONOTONIC.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mpwatch.options.worker_info import Worker
from mpwatch.os_support.clock import monotonic
from mpwatch.results.collective import Collective
from mpwatch.results.model import Lateness, Progress, make_progress
from mpwatch.results.rank_collectives import RankCollectives
from mpwatch.watcher.diagnosis.collective_verdict import CollectiveVerdict, get_current_collective
from mpwatch.watcher.machine.transitions import InterruptCause, StopReason
from mpwatch.watcher.output.pipes import StderrTail
from mpwatch.wire.messages import Message
from mpwatch.wire.shared_memory import HeartbeatSample


@dataclass
class RankObservations:
    worker: Worker
    stderr_tail: StderrTail = field(default_factory=StderrTail)
    pid: int | None = None
    was_ready: bool = False
    raised_at: float | None = None  # when the function raised, from the message FAILING; the exception is in `answer`
    answer: Message | None = None  # RETURNED, RAISED or LOAD_FAILED
    answer_received_at: float | None = None  # later than the time stamp of the message
    details: bytes = b""  # the pickled parts of a reported exception
    local_variables: bytes = b""  # the texts of local variables, with debug="locals"
    died_at: float | None = None  # set as soon as the watcher sees that the rank is dying (death_order.py)
    has_exited: bool = False  # whether the watcher has noticed the end of the process
    exit_code: int | None = None  # as in multiprocessing: negative after a signal; None if it is unknown
    oom_proof: str = ""  # what proves that the kernel's out-of-memory killer killed the rank
    # The stacks of all threads just before the watcher stopped the rank, in faulthandler's format, with source lines.
    stacks: str = ""
    crash_stack: str = ""  # the Python stack at the moment of a crash, in the same format
    startup_output: str = ""  # what the interpreter printed, if the rank never became ready
    stderr: str = ""  # its last lines, if the watcher reads it
    is_dump_for_report: bool = False  # whether it was asked because it is stopped, not only for `stacks()` or Ctrl-Backslash
    # The latest ones at the first sign of a failure, or when the rank raised. None if it was not asked or did not answer.
    collectives: RankCollectives | None = None
    collectives_at: float = 0.0  # when they were read
    process_state: str = ""  # its letter when the watcher asked for stacks, see proc(5)
    # The last heartbeat, and the last `mpwatch.report()`.
    heartbeat: HeartbeatSample = field(default_factory=HeartbeatSample)
    stopped_step: int | None = None  # the step at which `should_stop` has returned True
    signals_sent: set[int] = field(default_factory=set)
    first_signal_at: float = 0.0  # when the first of them was sent

    def add_collectives(self, answer: RankCollectives | None) -> None:
        """Keep the earlier answer if this one has no new call: once a collective has failed, its source line is lost."""
        if answer is not None and (self.collectives is None or answer.has_call_after(self.collectives)):
            self.collectives, self.collectives_at = answer, monotonic()

    @property
    def collective(self) -> Collective | None:
        """The one in which the rank waits, or else its last one."""
        return None if self.collectives is None else get_current_collective(self.collectives)

    def get_progress(self, run_started_at: float) -> Progress | None:
        report = self.heartbeat.report
        return None if report is None else make_progress(report, run_started_at)


@dataclass(frozen=True)
class AttemptObservations:
    ranks: Mapping[int, RankObservations]
    hostname: str
    run_started_at: float
    stopped_at: float | None  # when the watcher began to stop the ranks
    stop_reason: StopReason | None
    never_ready: Iterable[int] = ()  # ranks that were not ready within `start_timeout`
    # Ranks that sent no heartbeat within `heartbeat_timeout`, with the time of their last one.
    silent_ranks: Mapping[int, float] = field(default_factory=dict)
    passed_limit: str = ""  # such as "timeout=60 s"
    heartbeat_timeout: float | None = None
    start_timeout: float = 0.0
    signum: int | None = None  # the signal that stopped the run, or one with the same effect as what did
    interrupt_cause: InterruptCause = InterruptCause.SIGNAL  # if there is a `signum`
    stop_cause: str = ""  # what has asked the ranks to save and return, if anything
    stop_timeout: float | None = None  # the limit for that, if the ranks have exceeded it
    log_dir: str = ""
    collective_verdict: CollectiveVerdict | None = None  # which has ended the attempt
    slow_rank: Lateness | None = None
    helpers_oom: str = ""  # what shows that the out-of-memory killer killed other processes than the ranks
    attempt_started_at: float = 0.0  # when these ranks were started
    all_ready_at: float | None = None
    ended_at: float = 0.0

    @property
    def attempt(self) -> int:
        """Counts from 0."""
        return next(iter(self.ranks.values())).worker.restart_count

    @property
    def healthy_seconds(self) -> float:
        return 0.0 if self.all_ready_at is None or self.stopped_at is None else self.stopped_at - self.all_ready_at

    @property
    def unused_heartbeat_timeout(self) -> float | None:
        """`heartbeat_timeout`, if it is set and no rank has called `heartbeat()` or `report()`."""
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
