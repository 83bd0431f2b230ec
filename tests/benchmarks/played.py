"""Plays one measurement in a program of its own, which ends, or is ended, before this returns, with all that it has left.

This process is made the reaper of every orphan among its descendants (PR_SET_CHILD_SUBREAPER): so whoever is left of a
launcher, in whatever session or process group, becomes a child of ours when its own parent has gone, and is found.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

from measures import Measure

__all__ = ["adopt_orphans", "play"]

HERE = Path(__file__).parent
# Python's own settings are left out: without bytecode files, for one, every rank would compile what it imports.
ENV = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
ENV["PYTHONPATH"] = os.pathsep.join(
    [str(HERE), *map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
)
PR_SET_CHILD_SUBREAPER = 36
GONE_WITHIN = 2.0  # seconds; a resource tracker needs some to see that its program has ended, and so have Ray's processes


def adopt_orphans() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def play(name: str, measure: Measure, launcher: str, ranks: int) -> dict[str, float | str | list[str]]:
    """The figures, or the `error` why there are none; and the command lines of the processes that were `left`."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, str(HERE / measure.program), name, launcher, str(ranks), folder]
        (temporary := Path(folder, "tmp")).mkdir()
        with open(f"{folder}/out", "wb") as out, open(f"{folder}/err", "wb") as err:
            program = subprocess.Popen(
                command,
                cwd=folder,
                env={**ENV, "TMPDIR": str(temporary)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                status = program.wait(measure.timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                program.kill()
                program.wait()
                left = end_orphans()
        figures = _figures(Path(folder, "out").read_text(errors="replace"), Path(folder, "err"), status, measure.timeout)
    return {**figures, "left": left} if left else figures


def _figures(out: str, err: Path, status: int | None, timeout: float) -> dict[str, float | str | list[str]]:
    if status is None:
        return {"error": f"no end within {timeout:g} s"}
    if status:
        lines = err.read_text(errors="replace").split("\n")
        return {"error": next((line for line in reversed(lines) if line.strip()), f"exit status {status}")[:200]}
    return json.loads(next(line for line in reversed(out.split("\n")) if line.startswith("{")))


def end_orphans() -> list[str]:
    """Waits a little for them to end, then kills them, and whoever that makes an orphan; who had to be killed."""
    killed, patience = [], time.monotonic() + GONE_WITHIN
    while orphans := _children():
        if (seconds := patience - time.monotonic()) > 0:
            _one_ends(orphans, seconds)
            continue
        for pid in orphans:  # ours to reap: a number that cannot have become somebody else's
            killed += filter(None, [_line_of(pid)])  # a zombie has none
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return killed


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _one_ends(pids: list[int], seconds: float) -> None:
    with contextlib.ExitStack() as stack:
        pidfds = {pid: os.pidfd_open(pid) for pid in pids}
        for pidfd in pidfds.values():
            stack.callback(os.close, pidfd)
        ended = wait(pidfds.values(), seconds)
        for pid, pidfd in pidfds.items():
            if pidfd in ended:
                os.waitpid(pid, 0)


def _line_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()[:200]
    return ""
