"""The failure of one rank, and the text that says what happened to this rank. Without I/O.

`summarize_exception` runs user code, so the watcher thread calls only `format_exit` of this module.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from mpwatch.results.collective import Collective
from mpwatch.results.places import format_location, format_raise_location
from mpwatch.results.texts import clean_text, format_ranks
from mpwatch.wire.exceptions import decoder
from mpwatch.wire.exceptions.encoder import ExceptionEncoder

USUAL_CAUSES = {
    signal.SIGSEGV: "an invalid memory access, usually in compiled code",
    signal.SIGBUS: "a memory error, often a full /dev/shm",
    signal.SIGFPE: "an arithmetic error in compiled code",
    signal.SIGILL: "an instruction this CPU does not have",
    signal.SIGABRT: "compiled code called abort(): see the end of stderr",
    signal.SIGKILL: "not sent by mpwatch: the out-of-memory killer, or somebody's kill -9",
    signal.SIGTERM: "not sent by mpwatch: somebody's kill, or a job scheduler",
}
TEXT_LIMIT = 500  # characters of an exception's text in a line of the report


class FailureKind(Enum):
    """The possible reasons why a rank has no result.

    Attributes:
        EXCEPTION: the function raised, or its return value could not be pickled, sent or unpickled.
        EXIT: the rank exited with a status other than 0.
        SIGNAL: a signal killed the rank, and the watcher did not send this signal.
        OOM: the kernel's out-of-memory killer killed the rank, and there is proof.
        MISMATCH: the rank called another collective than the other ranks, or returned while they waited for it in a
            collective.
        HANG: the rank sent no heartbeat for `heartbeat_timeout`, or kept the other ranks waiting in a collective.
        START: the rank ended, failed or timed out before it called the function.
        LOST: the rank ended without a result, with status 0 or an unknown status. Or the node of the rank was lost.
        TIMEOUT: the rank was still running when `timeout` expired.
    """

    EXCEPTION = "EXCEPTION"
    EXIT = "EXIT"
    SIGNAL = "SIGNAL"
    OOM = "OOM"
    MISMATCH = "MISMATCH"
    HANG = "HANG"
    START = "START"
    LOST = "LOST"
    TIMEOUT = "TIMEOUT"


# To add a field: add it here, and set it in watcher/diagnosis/failures.py. Other nodes get it automatically:
# nodes/failure_codec.py encodes all fields of this class.
@dataclass(frozen=True, kw_only=True)
class ProcessFailure:
    """The failure of one rank.

    If the watcher stopped a rank because another rank had failed, the stopped rank has no ProcessFailure.

    Attributes:
        rank: number of the rank among all ranks of the run or the job, from 0.
        local_rank: number of the rank among the ranks of its node, from 0.
        pid: process id of the rank. Another process may have this id by now. It is None if it is not known, for example
            because the node was lost.
        hostname: name of the machine of the rank, as `platform.node()` returns it there.
        group_rank: number of the rank's node in a job of several nodes. It is None in a run on one node.
        node_ranks: if the whole node was lost, all ranks of this node. Otherwise it is empty.
        kind: what kind of failure it is.
        exit_code: the exit status that a shell would show: 1 for an exception, the code of SystemExit, or 128 + n for signal
            n. It is never 0.
        signal: number of the signal that killed the rank. It is None if no signal killed the rank.
        exception: the rank's own exception, with its cause, context, notes and frames, or a stand-in of the same name, base
            classes and text if it cannot be pickled. It is None if the rank raised no exception, or could not send it.
        summary: what happened: the type and the text of the exception, as formatted in the rank. Without an exception, it
            says how the rank ended, such as "was killed by SIGSEGV (...)". mpwatch never leaves it empty.
        traceback: the traceback as the rank would have printed it, with source lines. It is empty if there is no exception.
        stack: the Python stacks of a rank that crashed, hung or exceeded the timeout, in the format of faulthandler, with
            source lines. The innermost frame is first. The text is empty if there are no stacks.
        stderr: the last lines of the rank's stderr, if the option `logs` lets the watcher read stderr. If the rank never
            became ready, it is what the interpreter of the rank printed.
        log_files: paths of the rank's log files, by the names of the streams: "stdout", "stderr". The dict is empty without
            log files. See `LogSpec`.
        evidence: what else is known about the cause, for example the proof of an OOM kill. It may be empty.
        collective: the collective in which the rank waited, or otherwise the last collective of the rank. It is None if
            torch's flight recorder has no collective.
        is_secondary: whether this failure is the consequence of another failure, because the rank lost another rank, or
            waited for another rank without success.
        elapsed: seconds from the start of the run to the failure. For a silent rank, seconds from the start of the run to
            its last heartbeat.
    """

    rank: int
    local_rank: int
    pid: int | None
    hostname: str
    group_rank: int | None = None
    node_ranks: tuple[int, ...] = ()
    kind: FailureKind
    exit_code: int
    signal: int | None = None
    exception: BaseException | None = None
    summary: str = ""
    traceback: str = ""
    stack: str = ""
    stderr: str = ""
    log_files: Mapping[str, str] = field(default_factory=dict)
    evidence: str = ""
    collective: Collective | None = None
    is_secondary: bool = False
    elapsed: float = 0.0

    def __post_init__(self) -> None:
        for name in ("summary", "traceback", "stack", "stderr", "evidence"):
            object.__setattr__(self, name, clean_text(getattr(self, name)))

    def __str__(self) -> str:
        return format_failure(self)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)  # many exceptions cannot be pickled
        if self.exception is not None:
            encoder = ExceptionEncoder(self.exception)
            state["exception"] = (encoder.plain(), encoder.details(), encoder.locals())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["exception"] is not None:
            state = {**state, "exception": decoder.decode_exception(*state["exception"])}
        self.__dict__.update(state)


@dataclass(frozen=True, kw_only=True)
class ItemFailure:
    """A failed item of `mpwatch.map`.

    Attributes:
        index: position of the item among all items, from 0.
        item: the `repr` of the item, at most 200 characters.
        failure: what happened to the rank that had the item, such as its exception or the death of its process. See
            ProcessFailure.
        attempts: how many times the function was called with the item. It is at least 1.
        reason: why the item was not tried again. It is empty if the caller did not allow restarts.
    """

    index: int
    item: str
    failure: ProcessFailure
    attempts: int = 1
    reason: str = ""

    @property
    def exception(self) -> BaseException | None:
        """The exception that the user's function raised for this item.

        If the function raised no exception, for example because the rank was killed, the property is None. The property is
        also None if the rank could not send the exception to the watcher.
        """
        return self.failure.exception

    def __str__(self) -> str:
        """Return a line such as `item number 17 ('a.txt') failed: rank 2: ValueError: ... (2 attempts)`."""
        attempts = f" ({self.attempts} attempts)" if self.attempts > 1 else ""
        reason = f"; {self.reason}" if self.reason else ""
        return f"{name_item(self.index, self.item)} failed: {format_failure(self.failure)}{attempts}{reason}"


def name_item(index: int, item: str) -> str:
    return f"item number {index} ({item})"


def add_summary(failure: ProcessFailure) -> ProcessFailure:
    return failure if failure.summary else replace(failure, summary=describe_failure(failure))


def format_failure(failure: ProcessFailure) -> str:
    return f"{name_rank(failure)}: {describe_failure(failure)}"


def format_root_cause(root: ProcessFailure) -> str:
    if root.node_ranks:
        return f"{_name_node(root)} with {format_ranks(root.node_ranks)} was lost: {root.evidence}"
    if root.is_secondary:
        return f"no rank was seen to fail by itself; the first to report a problem with a peer: {format_failure(root)}"
    if root.kind is FailureKind.EXCEPTION:
        return f"{name_rank(root)} failed first: {describe_failure(root)}"
    return f"{name_rank(root)} {describe_failure(root)}"


def name_rank(failure: ProcessFailure) -> str:
    """Return a name such as `rank 3 on node 1 (host2)`. If the whole node was lost, `describe_failure` names the node."""
    node = "" if failure.group_rank is None or failure.node_ranks else f" on {_name_node(failure)}"
    return f"rank {failure.rank}{node}"


def _name_node(failure: ProcessFailure) -> str:
    return f"node {failure.group_rank} ({failure.hostname})"


def describe_failure(failure: ProcessFailure) -> str:
    """Return a phrase that says what happened to a rank, such as `was killed by SIGKILL (...)`."""
    if failure.kind is FailureKind.SIGNAL:
        return _describe_signal(failure.signal, failure.evidence)
    if failure.kind is FailureKind.OOM:
        return f"was killed by the kernel's out-of-memory killer ({failure.evidence})"
    if failure.kind is FailureKind.EXCEPTION:
        return _describe_exception(failure)
    if failure.kind is FailureKind.START:
        return _describe_start_failure(failure)
    if failure.kind is FailureKind.MISMATCH:
        return failure.evidence
    if failure.kind is FailureKind.HANG and failure.is_secondary:
        return f"waited{format_location(failure.stack)}, {failure.evidence.removeprefix('was ')}"
    if failure.kind is FailureKind.HANG:
        return f"{failure.evidence or 'hung'}: still at work{format_location(failure.stack)}"
    if failure.kind is FailureKind.TIMEOUT:
        return f"still at work{format_location(failure.stack)}"
    if failure.node_ranks:
        return f"lost with {_name_node(failure)}: {failure.evidence}"
    because = failure.evidence or (_describe_exception(failure) if failure.exception else "")
    if failure.kind is FailureKind.EXIT:
        return f"ended with exit code {failure.exit_code} and no result" + (f" ({because})" if because else "")
    usual = "os._exit(0), os.exec*(), or other code in this program took its exit status"
    return f"ended without returning a result ({because or usual})"


def format_exit(code: int) -> str:
    """Return a phrase that says how a process ended. As in multiprocessing, `code` is negative for a signal."""
    return _describe_signal(-code) if code < 0 else f"ended with exit code {code}"


def _describe_signal(number: int | None, evidence: str = "") -> str:
    try:
        name = signal.Signals(number or 0)
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {number}"
    cause = evidence or USUAL_CAUSES.get(name)
    return f"was killed by {name.name}" + (f" ({cause})" if cause else "")


def _describe_start_failure(failure: ProcessFailure) -> str:
    if failure.signal is not None:
        return f"never started: it {_describe_signal(failure.signal, failure.evidence)}"
    if failure.evidence:
        return f"never started: {failure.evidence}"
    if failure.exception is not None:
        hint = "; a rank uses the caller's sys.path, and imports modules from where the caller found them"
        lacks = isinstance(failure.exception, ImportError | AttributeError)
        return f"could not load the call: {_describe_exception(failure)}{hint if lacks else ''}"
    return f"never started: its interpreter ended with exit code {failure.exit_code}"


def _describe_exception(failure: ProcessFailure) -> str:
    if failure.exception is None:
        return "raised an exception that could not be sent" + (f" ({failure.evidence})" if failure.evidence else "")
    text = (failure.summary or summarize_exception(failure.exception)).strip()
    line = text.partition("\n")[0]
    return line[:TEXT_LIMIT] + (" …" if line[:TEXT_LIMIT] != text else "") + format_raise_location(failure.exception)


def summarize_exception(error: BaseException) -> str:
    try:
        text = str(error).strip()
    except BaseException as broken:  # noqa: BLE001  user code of the class, which may even exit
        text = f"<its __str__ raised {type(broken).__name__}>"
    return clean_text(f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__)
