"""What docs/how-to/migrate.md promises to a program that moves from torchrun or accelerate: the old one and the new one do the same."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch.distributed.elastic.multiprocessing.errors

import mpwatch
from mpwatch.integrations.accelerate import notebook_launcher
from support.ports import free_port
from support.programs import ENV, python
from trainers.old_ways import NOTEBOOK, SCRIPT

QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}
LOGS = 'max_restarts=1, logs=mpwatch.LogSpec("logs", show=0)'
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")


# ---- torchrun


class Job:
    """A finished run of the script with two ranks: exit status, output, and contents of log files."""

    def __init__(self, ending, launcher=()):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train.py").write_text(SCRIPT + ending)
            command = [sys.executable, *launcher, "train.py", "--lr", "0.1"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=QUIET, timeout=100, check=False)
            self.status, self.out, self.err = done.returncode, done.stdout, done.stderr
            (home,) = Path(folder, "logs").iterdir()  # named by the run_id
            self.files = {str(path.relative_to(home)): path.read_text() for path in home.rglob("std*.log")}

    def read_report(self, rank, attempt=1):
        """Return the arguments and the environment variables that this rank has printed."""
        return json.loads(self.files[f"attempt_{attempt}/{rank}/stdout.log"])


@pytest.fixture(scope="module")
def theirs():
    return Job("main()", (*TORCHRUN, "--log-dir=logs", "--tee=3", "--local-ranks-filter=0"))


WAYS = {  # the end of the script, and how it is started
    "main": (f"import mpwatch\nmpwatch.main(main, 2, {LOGS})", ()),
    **{
        name: ("main()", ("-c", f"import mpwatch, sys\nmpwatch.main(mpwatch.Script({script}), nprocs=2, {LOGS})"))
        for name, script in {"file": "*sys.argv[1:]", "module": '*sys.argv[2:], module="train"'}.items()
    },
}


@pytest.mark.parametrize(("ending", "launcher"), WAYS.values(), ids=WAYS)
def test_a_script_has_the_arguments_the_environment_the_restarts_and_the_logs_of_torchrun(theirs, ending, launcher):
    ours = Job(ending, launcher)
    assert (theirs.status, ours.status) == (1, 3)  # torchrun does not pass the status on
    assert ours.files.keys() == theirs.files.keys()
    for rank in range(2):
        arguments, variables = ours.read_report(rank)
        assert [arguments, variables] == theirs.read_report(rank)
        assert (arguments, variables["RANK"], variables["TORCHELASTIC_RESTART_COUNT"]) == (["--lr", "0.1"], str(rank), "1")
    for job in (theirs, ours):
        assert set(re.findall(r'"RANK": "(\d)"', job.out)) == {"0"}  # torchrun may divide a line
        assert "of rank 0" in job.err
        assert job.files["attempt_1/1/stderr.log"].startswith("of rank 1\n")


def test_record_of_torch_does_no_harm():
    @torch.distributed.elastic.multiprocessing.errors.record
    def main():
        raise KeyError("lr")

    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(main, 1)
    assert type(caught.value.__cause__) is KeyError
    assert 'raise KeyError("lr")' in caught.value.root_cause.traceback


def test_main_exits_like_a_program_that_a_signal_has_killed():
    program = "import mpwatch, os, signal\nmpwatch.main(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)"
    assert python("-c", program, check=False).returncode == 128 + signal.SIGKILL


# ---- accelerate


def read_rank_environments(home):
    """Run the program with the `notebook_launcher` of this module. Return the port, and what its ranks have found."""
    with tempfile.TemporaryDirectory() as folder:
        program, port = Path(folder, "train.py"), str(free_port())
        program.write_text(NOTEBOOK.replace("LAUNCHER", f"from {home} import notebook_launcher"))
        (found := Path(folder, "found")).mkdir()
        python(str(program), str(found), port, cwd=folder, env=QUIET)
        return port, [json.loads(path.read_text()) for path in sorted(found.iterdir())]


@pytest.mark.slow
@pytest.mark.parametrize("home", ["accelerate", "mpwatch.integrations.accelerate"])
def test_only_the_import_of_notebook_launcher_changes(home):
    port, found = read_rank_environments(home)
    assert found == [[{"lr": 0.1}, [str(rank), "2", "127.0.0.1", port]] for rank in range(2)]


def test_ports_are_free_or_as_given():
    def my_port():
        return os.environ["MASTER_PORT"]

    def both():
        """Return the ports of this run and of a run inside it, which exist at the same time."""
        return my_port(), notebook_launcher(my_port, num_processes=1)[0]

    assert len({"29500", *notebook_launcher(both, num_processes=1)[0]}) == 3
    port = str(free_port())
    assert notebook_launcher(my_port, num_processes=1, use_port=port)[0] == port
    assert mpwatch.run(my_port, 1, env={"MASTER_PORT": port})[0] == port
