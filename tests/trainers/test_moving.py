"""What docs/how-to/migrate.md promises to a script that moves from torchrun: it finds the same as before."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch.distributed.elastic.multiprocessing.errors

import mpwatch
from support.programs import ENV

QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}
LOGS = 'max_restarts=1, logs=mpwatch.LogSpec("logs", show=0)'
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")


# A script for torchrun. In each attempt rank 1 exits when rank 0 has printed all.
SCRIPT = """
import json, os, signal, sys

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")

def main():
    print(json.dumps([sys.argv[1:], {name: os.environ[name] for name in NAMES}]))
    print("of rank", os.environ["RANK"], file=sys.stderr)
    sys.stdout.flush(), sys.stderr.flush()
    mark = "printed in attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "0":
        open(mark, "w").close()
        signal.pause()  # until it is stopped
    while not os.path.exists(mark):
        os.sched_yield()
    sys.exit(3)

"""


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
