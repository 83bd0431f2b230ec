"""Plays a history in a program of its own, strikes its watcher, and gathers what can be seen from outside.

Whoever belongs to the program carries a mark of the history in its environment: so those are found that it has left. What
is left is told, and then killed. Zombies have no environment any more; the program itself says whether it has any.
"""

import contextlib
import json
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

from board import ALARM, BEGAN, ENDED, Board
from histories import Blow, History
from programs import ENV

__all__ = ["Evidence", "play"]

HERE = Path(__file__).parent
LONGEST = 60.0  # seconds for a history, which takes two
GONE_WITHIN = 1.0
MARK = "MPWATCH_CHAOS_MARK"


@dataclass
class Evidence:
    """What was seen. Times are of CLOCK_MONOTONIC."""

    status: int | None = None  # None: it had to be killed
    said: dict | None = None  # its line of JSON
    began: float | None = None  # the call of `run`, as the program saw it
    ended: float | None = None
    exited: float = 0.0  # the program, as seen from here
    cleared: float = 0.0  # when nothing was left, or no longer waited for
    struck: list[float] = field(default_factory=list)  # the watcher, or its guardian
    rang: float | None = None  # its own timer
    ranks: dict[int, float] = field(default_factory=dict)  # when each did what it was there for
    left_at_once: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # a second later
    files: list[str] = field(default_factory=list)
    err: str = ""
    dump: str = ""  # if it had to be killed


def play(history: History, folder: Path) -> Evidence:
    """In a folder that is still empty."""
    seen, mark = Evidence(), uuid.uuid4().hex
    (folder / "tmp").mkdir()
    (folder / "history").write_bytes(pickle.dumps(history))
    board = Board(str(folder), len(history.parts))
    doors = board.open_doors()
    try:
        _play(history, folder, mark, seen)
        seen.began, seen.ended, seen.rang, seen.ranks = *map(board.read, (BEGAN, ENDED, ALARM)), board.read_ranks()
    finally:
        for pid in _marked(mark):
            _kill(pid)
        for door in doors:
            os.close(door)
        board.close()
    seen.files = sorted(os.listdir(folder / "tmp"))
    return seen


def _play(history: History, folder: Path, mark: str, seen: Evidence) -> None:
    path = os.pathsep.join([str(HERE), ENV["PYTHONPATH"]])
    ready, go = os.pipe()
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err, open(ready, "rb") as is_ready:
        program = subprocess.Popen(
            [sys.executable, str(HERE / "host.py"), str(folder), str(go)],
            env={**ENV, "PYTHONPATH": path, "TMPDIR": str(folder / "tmp"), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[go],
            start_new_session=True,
        )
        os.close(go)
        if history.strike is None or not history.strike.from_interpreter:
            is_ready.read(1)
        _strike(history, program, seen)
        if not _ends(program.pid, LONGEST):
            seen.dump = _dump(program, mark, folder)
            program.kill()
        seen.exited = time.monotonic()
    _look_for_what_is_left(mark, seen)
    status = program.wait()
    seen.status = None if seen.dump else status
    seen.said = _said((folder / "out").read_text())
    seen.err = (folder / "err").read_text(errors="replace")


def _strike(history: History, program: subprocess.Popen, seen: Evidence) -> None:
    """At its instant, which is the only thing that is slept for here."""
    strike = history.strike
    if strike is None:
        return
    if strike.blow is Blow.KILL_GUARDIAN:
        _pass(strike.at, program.pid)
        for guardian in _guardians_of(program.pid):
            seen.struck.append(time.monotonic())
            _kill(guardian)
        return
    seconds = strike.at
    for number in strike.blow.signals:
        _pass(seconds, program.pid)
        seen.struck.append(time.monotonic())
        os.kill(program.pid, number)  # not yet reaped, if it has ended
        seconds = strike.gap


def _pass(seconds: float, pid: int) -> None:
    """So long, unless the program ends before."""
    _ends(pid, seconds)


def _ends(pid: int, within: float) -> bool:
    pidfd = os.pidfd_open(pid)
    try:
        return bool(wait([pidfd], within))
    finally:
        os.close(pidfd)


def _guardians_of(pid: int) -> list[int]:
    try:
        children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in children if "guardian/main.py" in _line_of(child)]
    except OSError:  # the program has ended, or a child of it
        return []


def _look_for_what_is_left(mark: str, seen: Evidence) -> None:
    """At the program's end, when only multiprocessing's resource tracker may still be about to end, and a second later."""
    left = _marked(mark)
    seen.left_at_once = [_describe(pid, line) for pid, line in left.items() if "resource_tracker" not in line]
    while left and time.monotonic() < seen.exited + GONE_WITHIN:
        os.sched_yield()
        left = _marked(mark)
    seen.left = [_describe(*process) for process in left.items()]
    seen.cleared = time.monotonic()


def _marked(mark: str) -> dict[int, str]:
    """All that live and were started by the program, or by what it had started, with their command lines."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            line = _line_of(pid)  # first: a process that has an environment afterwards was not yet about to end
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = line
    return found


def _line_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _describe(pid: int, line: str) -> str:
    try:
        state, parent, group, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # see proc(5)
    except OSError:
        return f"{pid}, which has just gone: {line[:120]}"
    return f"{pid} (state {state}, parent {parent}, group {group}, session {session}): {line[:120]}"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _dump(program: subprocess.Popen, mark: str, folder: Path) -> str:
    """Where it hangs."""
    lines = [f"it had not ended after {LONGEST:g} s"]
    program.send_signal(signal.SIGCONT)
    program.send_signal(signal.SIGUSR1)  # has it write its stack
    _pass(1.0, program.pid)
    lines += [_describe(*process) for process in _marked(mark).items()]
    return "\n".join([*lines, (folder / "err").read_text(errors="replace")[-8000:]])


def _said(out: str) -> dict | None:
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if not lines:
        return None
    said = json.loads(lines[-1])
    for name in ("failures", "states"):
        if name in said:
            said[name] = {int(rank): what for rank, what in said[name].items()}
    return said
