"""How programs with Lightning end after a failure of rank 1: with watched strategies, and with Lightning's own launchers."""

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

import pytest

from support.programs import ENV

HERE = Path(__file__).parent
QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}  # torch warns of functions that Lightning calls
PROGRAM_SECONDS = 110.0  # time limit of a program
ENDS = {  # failure of rank 1: exit status of the program, what it prints
    "raises": (1, "\nrank 1 failed first: BadShardError: shard 1 has 17 columns, not 16"),
    "killed": (128 + signal.SIGKILL, "\nrank 1 was killed by SIGKILL"),
    "exits": (3, "\nrank 1 ended with exit code 3"),
    "interrupted": (1, "\nCtrl-C works as before: True\n"),
}
ENDS_OF_DDP_SPAWN = {
    "raises": "\ntorch.multiprocessing.spawn.ProcessRaisedException",  # the type is lost
    "killed": "process 1 terminated with signal SIGKILL",
    "exits": "process 1 terminated with exit code 3",
}


@dataclass
class ProgramEnd:
    """How misfortune.py ended."""

    output: str
    status: int
    seconds: float  # from the failure to the end of the program
    raised: float | None  # seconds from the failure to the caller's exception
    left: list[str]  # commands of processes that are left, except multiprocessing's resource tracker


@pytest.mark.parametrize("failure", ["raises", *(pytest.param(name, marks=pytest.mark.slow) for name in [*ENDS][1:])])
def test_a_failure_of_rank_1_ends_the_program_at_once_and_is_reported(failure):
    status, text = ENDS[failure]
    end = run_program("watched", failure)
    assert end.status == status
    assert text in end.output
    assert end.seconds < 15  # Python unloads torch and Lightning, which takes seconds on a busy machine
    assert failure == "interrupted" or end.raised < 4
    assert end.left == []
    assert "Received SIGTERM" not in end.output  # Lightning's handler prints it
    if failure == "raises":
        assert "\nthe exception itself: True 17 explained by the strategy\n" in end.output


@pytest.mark.slow
@pytest.mark.parametrize(("failure", "code"), [("raises", 1), ("killed", -signal.SIGKILL), ("exits", 3)])
def test_ddp_of_lightning_polls_and_then_kills_its_caller(failure, code):
    """It polls every five seconds, then kills all processes, the caller first."""
    end = run_program("ddp", failure)
    assert end.status == -signal.SIGKILL
    assert end.seconds < 5 + 3
    assert f"terminated with code {code}. Forcefully terminating all other processes" in end.output


@pytest.mark.slow
@pytest.mark.parametrize("failure", ENDS_OF_DDP_SPAWN)
def test_the_exit_status_with_ddp_spawn_does_not_depend_on_that_of_the_rank(failure):
    end = run_program("ddp_spawn", failure)
    assert end.status == 1
    assert ENDS_OF_DDP_SPAWN[failure] in end.output


def run_program(launcher, failure):
    with tempfile.TemporaryFile("w+") as file:
        program = subprocess.Popen(
            [sys.executable, str(HERE / "misfortune.py"), launcher, failure],
            stdout=file,
            stderr=file,
            env=QUIET,
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
