"""Run one measurement in a program of its own. The program and all its descendants have ended when `run_program` returns.

This process is the reaper of every orphan among its descendants (PR_SET_CHILD_SUBREAPER). A process that a launcher leaves
becomes a child of this process when its parent exits, and so it is found in any session or process group.
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

HERE = Path(__file__).parent
# Without Python's own settings: if one disabled bytecode files, for example, every rank would compile what it imports.
ENV = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
ENV["PYTHONPATH"] = os.pathsep.join(
    [str(HERE), *map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
)
PR_SET_CHILD_SUBREAPER = 36
EXIT_SECONDS = 2.0  # seconds: a resource tracker and Ray's processes exit some time after their program


def adopt_orphans() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def run_program(name: str, measure: Measure, launcher: str, ranks: int) -> dict[str, float | str | list[str]]:
    """Return the figures, or an `error`. Under `left` are the command lines of processes that had to be killed."""
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
                left = kill_orphans()
        figures = _parse_figures(
            Path(folder, "out").read_text(errors="replace"), Path(folder, "err"), status, measure.timeout
        )
    return {**figures, "left": left} if left else figures


def _parse_figures(out: str, err: Path, status: int | None, timeout: float) -> dict[str, float | str | list[str]]:
    if status is None:
        return {"error": f"no end within {timeout:g} s"}
    if status:
        lines = err.read_text(errors="replace").split("\n")
        return {"error": next((line for line in reversed(lines) if line.strip()), f"exit status {status}")[:200]}
    return json.loads(next(line for line in reversed(out.split("\n")) if line.startswith("{")))


def kill_orphans() -> list[str]:
    """Wait EXIT_SECONDS for orphans to exit, then kill them and their descendants. Return the command lines of the killed ones."""
    killed, deadline = [], time.monotonic() + EXIT_SECONDS
    while orphans := _read_children():
        if (seconds := deadline - time.monotonic()) > 0:
            _wait_for_exit(orphans, seconds)
            continue
        for pid in orphans:  # not yet reaped, so no other process can have this pid
            killed += filter(None, [_read_command_line(pid)])  # a zombie has no command line
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return killed


def _read_children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _wait_for_exit(pids: list[int], seconds: float) -> None:
    with contextlib.ExitStack() as stack:
        pidfds = {pid: os.pidfd_open(pid) for pid in pids}
        for pidfd in pidfds.values():
            stack.callback(os.close, pidfd)
        ended = wait(pidfds.values(), seconds)
        for pid, pidfd in pidfds.items():
            if pidfd in ended:
                os.waitpid(pid, 0)


def _read_command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()[:200]
    return ""
