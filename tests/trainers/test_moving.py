"""Tests of each row of the tables of docs/how-to/migrate.md. The old program runs too, if that is cheap."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mpwatch
from mpwatch.integrations.accelerate import notebook_launcher
from support.ports import free_port
from support.programs import ENV, python
from trainers.old_ways import NOTEBOOK, SCRIPT

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "migrate.md").read_text()
ROWS = re.findall(r"^\| (?!what you had)(.+?) \| .+? \|$", PAGE, re.MULTILINE)
TESTED = []
QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}


def row(*what_you_had):
    """Mark a test as that of these rows of the tables."""
    TESTED.extend(what_you_had)
    return lambda test: test


def test_each_row_has_a_test_and_each_test_a_row():
    assert Counter(ROWS) == Counter(TESTED)
    assert len(ROWS) == PAGE.count("\n|") - 6  # three tables have two lines of heading each


# ---- torch.multiprocessing


@pytest.fixture(scope="module")
def spawned():
    """Return the results of the program with torch.multiprocessing."""
    return json.loads(python(str(Path(__file__).parent / "old_spawn.py"), str(free_port()), env=QUIET).stdout)


def run_as_file(program, *args):
    """Run the program as a script in a new folder. Return the finished process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(program)
        return python(str(path), *args, cwd=folder, env=QUIET)


@row(
    "`mp.spawn(fn, args=(a,), nprocs=4)`, which calls `fn(rank, a)`",
    "`queue.put(value)`, or `shared[rank] = value` in a `Manager().dict()`",
)
def test_the_rank_is_in_current_worker_and_values_are_returned(spawned):
    result = mpwatch.run(lambda a: [mpwatch.current_worker().rank, a, 3 * a], 2, args=(5,))
    assert [result[rank] for rank in range(2)] == spawned["values"]


@row('`os.environ["MASTER_PORT"] = "29500"`, `dist.init_process_group("gloo", rank=rank, world_size=4)`')
@pytest.mark.slow
def test_the_process_group_is_made_by_backend_or_by_the_function(spawned):
    def all_reduced(a):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        rank = mpwatch.current_worker().rank
        total = torch.tensor(a * (rank + 1))
        dist.all_reduce(total)
        dist.destroy_process_group()
        return [rank, a, int(total)]

    for backend in ("gloo", None):
        assert list(mpwatch.run(all_reduced, 2, args=(5,), backend=backend)) == spawned["values"]


@row(
    "`except ProcessRaisedException as error:`, whose text has the traceback",
    "`except ProcessExitedException as error:`, then `error.exit_code`",
)
@pytest.mark.parametrize(
    ("fail", "cause", "exit_code"), [(lambda: {}["lr"], KeyError, 1), (lambda: os._exit(3), type(None), 3)]
)
def test_the_error_has_the_exception_itself_and_the_exit_code(spawned, fail, cause, exit_code):
    text, their_cause = spawned["raised"]
    assert "KeyError: 'lr'" in text
    assert their_cause == "None"
    assert spawned["exited"] == 3
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(fail, 2)
    assert type(caught.value.__cause__) is cause
    assert caught.value.exit_code == exit_code
    assert caught.value.root_cause.kind is (mpwatch.FailureKind.EXIT if exit_code == 3 else mpwatch.FailureKind.EXCEPTION)


@row("`context = mp.spawn(fn, join=False)`, then `while not context.join(): ...`")
def test_a_run_may_be_waited_for_later():
    with ThreadPoolExecutor() as pool:
        future = pool.submit(mpwatch.run, lambda: {}["lr"], 2)
        other = pool.submit(mpwatch.run, os.getpid, 2)
        assert len({os.getpid(), *other.result()}) == 3
        assert type(future.exception().__cause__) is KeyError


@row('`mp.start_processes(fn, start_method="fork")`')
def test_ranks_are_no_forks_and_the_start_method_is_for_what_they_start():
    program = """
import multiprocessing, sys
import mpwatch
def fn():
    return multiprocessing.get_start_method(), hasattr(sys, "only_here")
multiprocessing.set_start_method("forkserver", force=True)
sys.only_here = True
print(list(mpwatch.run(fn, 1)))
"""
    assert python("-c", program).stdout == "[('forkserver', False)]\n"


@row('`if __name__ == "__main__":`')
def test_a_script_needs_no_guard():
    done = run_as_file("import mpwatch\nprint('once')\nprint(list(mpwatch.run(lambda: __name__, 2)))")
    assert done.stdout == "once\n['__main__', '__main__']\n"


# ---- accelerate


@pytest.fixture(scope="module")
def launched():
    """Return the environment of ranks of accelerate's own launcher, and of mpwatch's."""
    return [
        read_rank_environments(f"from {home} import notebook_launcher")
        for home in ("accelerate", "mpwatch.integrations.accelerate")
    ]


def read_rank_environments(launcher):
    with tempfile.TemporaryDirectory() as folder:
        run_as_file(NOTEBOOK.replace("LAUNCHER", launcher), folder, port := str(free_port()))
        return port, [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]


@row("`from accelerate import notebook_launcher`")
@pytest.mark.slow
def test_only_the_import_changes(launched):
    for port, found in launched:
        assert found == [[{"lr": 0.1}, [str(rank), "2", "127.0.0.1", port]] for rank in range(2)]


@row("`notebook_launcher(train, (config,), num_processes=4)`")
@pytest.mark.slow
def test_a_plain_run_has_the_same_environment(launched):
    def train(config):
        return [config, [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]]

    assert list(mpwatch.run(train, 2, args=({"lr": 0.1},))) == [[config, found[:3]] for config, found in launched[0][1]]


@row('`notebook_launcher(..., mixed_precision="bf16")`')
@pytest.mark.slow
def test_accelerate_gets_the_precision():
    def get_precision():
        from accelerate import Accelerator

        return Accelerator().mixed_precision

    assert notebook_launcher(get_precision, num_processes=1, mixed_precision="bf16")[0] == "bf16"
    assert mpwatch.run(get_precision, 1, env={"ACCELERATE_MIXED_PRECISION": "bf16"})[0] == "bf16"


@row('`notebook_launcher(..., use_port="29501")`, because 29500 was in use')
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


@row("a new kernel, because the old kernel had made an `Accelerator`")
def test_ranks_do_not_have_objects_of_the_caller(monkeypatch):
    monkeypatch.setattr(sys, "only_here", True, raising=False)  # stands for accelerate's state: see test_accelerate.py
    assert list(notebook_launcher(lambda: hasattr(sys, "only_here"), num_processes=2)) == [False, False]


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


LOGS = 'max_restarts=1, logs=mpwatch.LogSpec("logs", show=0)'


@pytest.fixture(scope="module")
def theirs():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return Job("main()", (*torchrun, "--max-restarts=1", "--log-dir=logs", "--tee=3", "--local-ranks-filter=0"))


@pytest.fixture(scope="module")
def ours():
    return Job(f"import mpwatch\nmpwatch.main(main, 2, {LOGS})")


def check_reports(ours, theirs):
    assert ours.read_report(0)[0] == ["--lr", "0.1"]
    assert [ours.read_report(rank) for rank in range(2)] == [theirs.read_report(rank) for rank in range(2)]


@row(
    "`torchrun --standalone --nproc-per-node=4 train.py --lr 0.1`",
    "`torchrun --standalone --nproc-per-node=4 -m pkg.train --lr 0.1`",
)
@pytest.mark.parametrize("script", ["*sys.argv[1:]", '*sys.argv[2:], module="train"'], ids=["file", "module"])
def test_a_script_stays_as_it_is(script, theirs):
    job = Job("main()", ("-c", f"import mpwatch, sys\nmpwatch.main(mpwatch.Script({script}), nprocs=2, {LOGS})"))
    assert (job.status, job.files.keys()) == (3, theirs.files.keys())
    check_reports(job, theirs)


@row("`torchrun --standalone --nproc-per-node=4 train.py --lr 0.1`, with `main()` at the end of train.py")
def test_the_last_line_of_a_script_changes(theirs, ours):
    check_reports(ours, theirs)


@row("`--nproc-per-node=gpu`, `cpu`, `auto`")
def test_one_rank_per_device():
    from torch.distributed.run import determine_local_world_size

    def count(nprocs):
        return mpwatch.WorkerSpec(fn=print, nprocs=nprocs).nprocs

    assert 1 <= count("cpu") <= determine_local_world_size("cpu")
    if torch.cuda.is_available():
        assert count("gpu") == count("auto") == determine_local_world_size("gpu") == determine_local_world_size("auto")
    else:
        assert count("auto") == count("cpu")
        for function in (count, determine_local_world_size):
            with pytest.raises(ValueError, match=r"no GPU here|Cuda is not available"):
                function("gpu")


@row("`--max-restarts=1`", '`os.environ["TORCHELASTIC_RESTART_COUNT"]`')
def test_restarts(theirs, ours):
    for job in (theirs, ours):
        assert {path.partition("/")[0] for path in job.files} == {"attempt_0", "attempt_1"}
        assert [job.read_report(0, attempt)[1]["TORCHELASTIC_RESTART_COUNT"] for attempt in range(2)] == ["0", "1"]

    def fn():
        count = mpwatch.current_worker().restart_count
        return sys.exit(3) if count == 0 else (count, os.environ["TORCHELASTIC_RESTART_COUNT"])

    assert mpwatch.run(fn, 1, max_restarts=1)[0] == (1, "1")


@row("`--log-dir=logs --redirects=3`", "`--log-dir=logs --tee=3`")
@pytest.mark.parametrize(("show", "shown"), [("none", []), (None, ["[0] hello", "[1] hello"])])
def test_lines_go_to_files_and_are_shown(show, shown, tmp_path, capfd):
    logs = mpwatch.LogSpec(tmp_path) if show is None else mpwatch.LogSpec(tmp_path, show=show)
    result = mpwatch.run(print, 2, args=("hello",), logs=logs)
    assert [Path(result.log_dir, f"attempt_0/{rank}/stdout.log").read_text() for rank in range(2)] == ["hello\n"] * 2
    assert sorted(capfd.readouterr().out.splitlines()) == shown


@row("`--log-dir=logs --tee=3 --local-ranks-filter=0`")
def test_one_rank_is_shown(theirs, ours):
    assert ours.files.keys() == theirs.files.keys()  # below the folder of the run the layout is the same
    for job in (theirs, ours):
        # not line by line, since torchrun may divide a line while it follows a file that grows
        assert set(re.findall(r'"RANK": "(\d)"', job.out)) == {"0"}
        assert "of rank 0" in job.err
        assert job.files["attempt_1/1/stderr.log"].startswith("of rank 1\n")


@row("`@record` on `main`")
def test_record_does_no_harm():
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        raise KeyError("lr")

    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(main, 1)
    assert type(caught.value.__cause__) is KeyError
    assert 'raise KeyError("lr")' in caught.value.root_cause.traceback


@row('`os.environ["LOCAL_RANK"]`, `RANK`, `WORLD_SIZE`, ...')
def test_the_environment(theirs):
    def both():
        me = mpwatch.current_worker()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        variables = {name: os.environ[name] for name in names}
        return variables, {name: str(getattr(me, name.lower())) for name in variables}

    for rank, (variables, of_worker) in enumerate(mpwatch.run(both, 2)):
        assert variables == of_worker
        assert variables.items() <= theirs.read_report(rank)[1].items()


@row("exit status 1 after every failure")
def test_the_exit_status(theirs, ours):
    assert (theirs.status, ours.status) == (1, 3)
    program = "import mpwatch, os, signal\nmpwatch.main(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)"
    assert python("-c", program, check=False).returncode == 128 + 9
