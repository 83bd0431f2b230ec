"""Run a history in a program of its own, inject the fault, and collect the evidence that can be seen from outside.

All processes of the program carry a mark of the history in their environment. By that mark the harness finds the processes
that are left. It records them, and then kills them. Zombies no longer have an environment: host.py reports its own.
"""

import ast
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from chaos.board import CALLED, ENDED, TIMER_FIRED, read_time
from chaos.histories import Fault, History
from support.programs import ENV

HERE = Path(__file__).parent
TIMEOUT = 60.0  # seconds for a history, which takes two
LOST_SECONDS = 10.0  # after which Ctrl-C has not been heard; a run ends within its grace period of 0.5 s
EXIT_SECONDS = 1.0  # within which all processes must exit after the program
MARK = "MPWATCH_CHAOS_MARK"


@dataclass
class Evidence:
    """What the harness saw of one run. Times are of CLOCK_MONOTONIC."""

    status: int | None = None  # None: the harness had to kill the program
    report: dict | None = None  # what the program printed of its run
    called_at: float | None = None  # `run` was called, as the program recorded it
    ended_at: float | None = None  # `run` returned or raised
    exited_at: float = 0.0  # the program exited, as the harness saw it
    cleaned_up_at: float = 0.0  # no process was left, or the harness stopped waiting for that
    injected_at: list[float] = field(default_factory=list)  # signals to the program or its guardian
    timer_fired_at: float | None = None  # the program's own timer
    acted_at: dict[int, float] = field(default_factory=dict)  # the action of each rank began
    left_at_exit: list[str] = field(default_factory=list)  # processes
    left_later: list[str] = field(default_factory=list)  # processes, EXIT_SECONDS later
    left_files: list[str] = field(default_factory=list)
    stderr: str = ""
    stack_dump: str = ""  # if the harness had to kill the program


def run_history(history: History, folder: Path) -> Evidence:
    """Run a history in an empty folder."""
    evidence, mark = Evidence(), uuid.uuid4().hex
    (folder / "tmp").mkdir()
    (folder / "history").write_bytes(pickle.dumps(history))
    try:
        _run_program(history, folder, mark, evidence)
    finally:
        for pid in _find_marked(mark):
            _kill(pid)
    evidence.called_at, evidence.ended_at, evidence.timer_fired_at = (
        read_time(folder, event) for event in (CALLED, ENDED, TIMER_FIRED)
    )
    acted_at = {rank: read_time(folder, rank) for rank in range(len(history.plans))}
    evidence.acted_at = {rank: at for rank, at in acted_at.items() if at is not None}
    evidence.left_files = sorted(os.listdir(folder / "tmp"))
    return evidence


def _run_program(history: History, folder: Path, mark: str, evidence: Evidence) -> None:
    ready_read, ready_write = os.pipe()
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err, open(ready_read, "rb") as ready:
        program = subprocess.Popen(
            [sys.executable, str(HERE / "host.py"), str(folder), str(ready_write)],
            env={**ENV, "TMPDIR": str(folder / "tmp"), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[ready_write],
            start_new_session=True,
        )
        os.close(ready_write)
        if not history.from_interpreter:
            ready.read(1)
        _inject(history, program, evidence)
        if history.fault is Fault.INTERRUPT and not _wait_for_exit(program.pid, LOST_SECONDS):
            _repeat_lost_interrupt(program, folder, evidence)
        if not _wait_for_exit(program.pid, TIMEOUT):
            evidence.stack_dump = _dump_stacks(program, mark, folder)
            program.kill()
        evidence.exited_at = time.monotonic()
    _find_leftovers(mark, evidence)
    status = program.wait()
    evidence.status = None if evidence.stack_dump else status
    lines = [line for line in (folder / "out").read_text().splitlines() if line.startswith("{")]
    evidence.report = ast.literal_eval(lines[-1]) if lines else None
    evidence.stderr = (folder / "err").read_text(errors="replace")


def _inject(history: History, program: subprocess.Popen, evidence: Evidence) -> None:
    """Inject the fault at its time. Nothing else in this module waits for a fixed time."""
    seconds = history.fault_at
    if history.fault is Fault.KILL_GUARDIAN:
        _wait_for_exit(program.pid, seconds)
        for guardian in _find_guardians(program.pid):
            evidence.injected_at.append(time.monotonic())
            _kill(guardian)
    for number in history.fault.signals if history.fault else ():
        _wait_for_exit(program.pid, seconds)
        evidence.injected_at.append(time.monotonic())
        os.kill(program.pid, number)  # if the program has exited, it is not yet reaped
        seconds = history.gap


def _repeat_lost_interrupt(program: subprocess.Popen, folder: Path, evidence: Evidence) -> None:
    """Press Ctrl-C again if the first one came before the call.

    CPython can lose it there: the import system ignores an exception in the callback that deletes a module's lock, and the
    start of the interpreter one in `import warnings`.
    """
    called_at = read_time(folder, CALLED)
    if called_at is not None and evidence.injected_at[-1] < called_at:
        program.send_signal(signal.SIGINT)


def _wait_for_exit(pid: int, seconds: float) -> bool:
    pidfd = os.pidfd_open(pid)
    try:
        return bool(wait([pidfd], seconds))
    finally:
        os.close(pidfd)


def _find_guardians(pid: int) -> list[int]:
    try:
        children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in children if "guardian/main.py" in _read_command_line(child)]
    except OSError:  # the program or one of its children has exited
        return []


def _find_leftovers(mark: str, evidence: Evidence) -> None:
    left = _find_marked(mark)  # the resource tracker of multiprocessing may still be about to exit
    evidence.left_at_exit = [f"{pid}: {command}" for pid, command in left.items() if "resource_tracker" not in command]
    while left and time.monotonic() < evidence.exited_at + EXIT_SECONDS:
        os.sched_yield()
        left = _find_marked(mark)
    evidence.left_later = [f"{pid}: {command}" for pid, command in left.items()]
    evidence.cleaned_up_at = time.monotonic()


def _find_marked(mark: str) -> dict[int, str]:
    """Return the pids and command lines of all processes that were started by the program or its descendants."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            command = _read_command_line(pid)  # first: a process that has an environment afterwards was not exiting
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = command
    return found


def _read_command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _dump_stacks(program: subprocess.Popen, mark: str, folder: Path) -> str:
    """Let a program that hangs write its stacks, and return them with the processes that are left."""
    program.send_signal(signal.SIGCONT)
    program.send_signal(signal.SIGUSR1)  # faulthandler writes the stacks
    _wait_for_exit(program.pid, 1.0)
    return "\n".join(
        [
            f"it had not exited after {TIMEOUT:g} s",
            *_find_marked(mark).values(),
            (folder / "err").read_text(errors="replace")[-8000:],
        ]
    )
