"""Cases with torch in which other launchers are known to hang, to leak or to blame the wrong rank."""

import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import mpwatch
from support.programs import ENV, command, in_own_process


def descendants(pid):
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += descendants(int(child))
    return found


def count_with_loaders(folder):
    step, rank = 0, mpwatch.current_worker().rank
    while True:
        for _ in torch.utils.data.DataLoader(torch.arange(8.0), num_workers=2):
            if mpwatch.should_stop(step):
                Path(folder, f"saved{rank}").touch()
                return step
            Path(folder, f"started{rank}").touch()
            step += 1


def run_until_signal(folder):
    result = mpwatch.run(count_with_loaders, 2, args=(folder,), stop=[signal.SIGUSR1])
    assert list(result) == [result.stopped_at] * 2


@pytest.mark.slow
def test_ranks_save_after_a_signal_to_every_process_of_a_job_step(tmp_path, eventually):
    """SLURM sends `--signal=USR1@120` to all processes, workers of DataLoaders included."""
    with subprocess.Popen([sys.executable, *command(run_until_signal, str(tmp_path))], env=ENV) as program:
        eventually(lambda: {"started0", "started1"} <= set(os.listdir(tmp_path)), 60)
        for pid in descendants(program.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        assert program.wait(60) == 0
    assert {"saved0", "saved1"} <= set(os.listdir(tmp_path))


@pytest.mark.slow
@in_own_process
def test_more_small_tensors_than_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    tensors = [torch.full((3,), float(n)) for n in range(2000)]
    for values in mpwatch.run(lambda tensors: [tensor + 1 for tensor in tensors], 2, args=(tensors,)):
        assert all(torch.equal(value, tensor + 1) for value, tensor in zip(values, tensors, strict=True))
