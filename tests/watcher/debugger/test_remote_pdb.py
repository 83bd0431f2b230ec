"""`python -m pdb -p PID` on a rank that mpwatch watches (PEP 768)."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mpwatch
from support.programs import ENV

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def wait_at_gate(gate):
    secret = f"secret of rank {mpwatch.current_worker().rank}"
    if mpwatch.current_worker().rank == 1:
        while not os.path.exists(f"{gate}.open"):
            threading.Event().wait(0.01)
    return secret


@pytest.mark.skipif(sys.version_info < (3, 14), reason="pdb -p came with Python 3.14")
@pytest.mark.skipif(
    os.getuid() != 0 and PTRACE_SCOPE.exists() and PTRACE_SCOPE.read_text().strip() != "0",
    reason="the kernel allows it to root only",
)
def test_pdb_attaches_to_a_rank(tmp_path):
    gate = tmp_path / "gate"
    with mpwatch.WorkerGroup(2) as group:
        pid = group.run(os.getpid)[1]
        results = []
        thread = threading.Thread(target=lambda: results.append(list(group.run(wait_at_gate, args=(str(gate),)))))
        thread.start()
        while "in wait_at_gate" not in group.stacks()[1]:
            assert thread.is_alive()
        commands = f"b {__file__}:{line_of('threading.Event()')}\nc\np secret\nclear 1\nq\n"
        pdb = [sys.executable, "-m", "pdb", "-p", str(pid)]
        done = subprocess.run(pdb, input=commands, text=True, capture_output=True, check=False, env=ENV, timeout=60)
        gate.with_suffix(".open").touch()
        thread.join()
    assert "'secret of rank 1'" in done.stdout, done.stdout + done.stderr
    assert results == [["secret of rank 0", "secret of rank 1"]]


def line_of(text):
    return 1 + next(number for number, line in enumerate(Path(__file__).read_text().splitlines()) if text in line)
