"""Show how programs with Lightning end after a failure of rank 1 while rank 0 is busy: the table of docs/benchmarks.md.

python lightning_failures.py     each failure with a watched strategy, with "ddp" and with "ddp_spawn"; five minutes

The figures are seconds from the failure to the exception in the caller and to the end of the program, and its exit status.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "tests" / "trainers" / "misfortune.py"
PROGRAM_SECONDS = 110.0  # time limit of a program
LAUNCHERS, FAILURES = ("watched", "ddp", "ddp_spawn"), ("raises", "killed", "exits")


@dataclass
class ProgramEnd:
    """How misfortune.py ended."""

    output: str
    status: int
    seconds: float  # from the failure to the end of the program
    raised: float | None  # seconds from the failure to the caller's exception
    left: list[str]  # commands of processes that are left, except multiprocessing's resource tracker


def run_program(launcher, failure, env=os.environ):
    with tempfile.TemporaryFile("w+") as file:
        program = subprocess.Popen(
            [sys.executable, str(PROGRAM), launcher, failure],
            stdout=file,
            stderr=file,
            env={**env, "PYTHONWARNINGS": "ignore"},  # torch warns of functions that Lightning calls
            start_new_session=True,
        )
        try:
            pidfd = os.pidfd_open(program.pid)
            assert wait([pidfd], timeout=PROGRAM_SECONDS), "it does not end"
            ended = time.monotonic()
            os.close(pidfd)
            left = [command for _, command in find_session_processes(program.pid)]
        finally:
            for pid, _ in find_session_processes(program.pid):
                os.kill(pid, signal.SIGKILL)
            program.wait()
        file.seek(0)
        output = file.read()
    at = {event: float(when) for event, when in re.findall(r"^(failed|raised)=([\d.]+)$", output, re.MULTILINE)}
    raised = at["raised"] - at["failed"] if "raised" in at else None
    return ProgramEnd(output, program.returncode, ended - at["failed"], raised, left)


def find_session_processes(leader):
    """Yield the pid and command of each process of the session, except the resource tracker and processes that are ending."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (entry / "cmdline").read_text().replace("\0", " ")
            if int(session) == leader and state not in "ZX" and command and "resource_tracker" not in command:
                yield int(entry.name), command


if __name__ == "__main__":
    for failure in FAILURES:
        for launcher in LAUNCHERS:
            end = run_program(launcher, failure)
            raised = "not raised" if end.raised is None else f"raised after {end.raised:.2f} s"
            print(f"rank 1 {failure}, {launcher}: {raised}, ended after {end.seconds:.1f} s, status {end.status}")
            print(*(f"    left: {command}\n" for command in end.left), sep="", end="", flush=True)
