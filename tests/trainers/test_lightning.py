"""Tests of Lightning's Trainer and Fabric with watched strategies: their results, and how they end after a failure."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpwatch.integrations.lightning.trainer_state import TrainerState
from notebooks.kernels import Kernel
from support.programs import ENV, python

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}  # torch warns of functions that Lightning calls
FAILURES = ("raises", "killed", "exits")
WATCHED_ONLY = ("interrupted",)
CELL = """
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from mpwatch.integrations.lightning import watched

class Mean(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
    def training_step(self, batch):
        return (self.weight - batch.mean()).square()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

model = Mean()
before = model.weight.item()
off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = Trainer(accelerator="cpu", devices=2, strategy=watched(DDPStrategy()), max_epochs=1, **off)
trainer.fit(model, torch.utils.data.DataLoader(torch.ones(16, 1), batch_size=2))
after = model.weight.item()
"""
PROGRAM_SECONDS = 90.0  # time limit of a program


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of tests/trainers/fitting.py."""
    folder, temporary = tmp_path_factory.mktemp("fitting"), tmp_path_factory.mktemp("temporary")
    out = python(str(HERE / "fitting.py"), cwd=folder, env={**QUIET, "TMPDIR": str(temporary)}).stdout
    return {**json.loads(out.splitlines()[-1]), "folder": str(folder), "temporary": os.listdir(temporary)}


def test_ranks_restarted_from_a_checkpoint_train_the_same_weights_as_ranks_that_never_failed(results):
    weights, world_size, loss = results["plain"]
    assert world_size == 2
    assert weights != results["first"]
    assert results["fit"]["restarts"] == 1
    assert results["fit"]["weights"] == weights
    assert results["fit"]["metrics"] == [loss] * 3


def test_ranks_are_children_of_the_caller_and_have_its_random_numbers(results):
    record = results["fit"]["recorder"]
    assert record.pop("random") == results["random"]
    assert record == {"parent": results["me"], "rank": 0, "local_rank": "0", "port": True, "launched": True}


def test_the_callers_trainer_has_the_state_of_rank_0(results):
    fit = results["fit"]
    assert fit["state"] == ["fit", "finished", None]
    assert (fit["epochs"], fit["steps"], results["saved_steps"]) == (3, 12, 12)
    assert (fit["best"], fit["last"], fit["score"]) == ([True, True], "last.ckpt", fit["metrics"][0])
    assert fit["second"]


def test_a_callback_that_cannot_take_over_its_state_is_named_in_a_warning(results):
    lost = "the caller's {} does not have the state of rank 0: its {} raised AttributeError {}: '{}' object has no attribute '{}'"
    caller = "in the caller, where Lightning does not call its setup"
    assert [warning for warning in results["warned"] if "Sharded" not in warning] == [
        lost.format("TornDown", "state_dict", "in rank 0", "TornDown", "count"),
        lost.format("SetUpInRanks", "load_state_dict", caller, "SetUpInRanks", "counts"),
    ]


def test_a_module_that_cannot_take_over_its_weights_is_named_in_a_warning():
    class Unready:
        def load_state_dict(self, weights, strict):
            raise AttributeError("no layer before setup")

    trainer = SimpleNamespace(
        lightning_module=Unready(),
        fit_loop=SimpleNamespace(load_state_dict=print),
        checkpoint_callback=None,
        callbacks=[],
        callback_metrics={},
        logged_metrics={},
        progress_bar_metrics={},
    )
    state = TrainerState(
        value=None,
        state="finished",
        should_stop=True,
        metrics={"callback_metrics": {"loss": 0.5}},
        first_checkpoint_paths={},
        checkpoint_paths={},
        callback_states={},
        progress={},
        weights={"layer": 1},
        problems=[],
    )
    with pytest.warns(match="so some weights were not loaded: AttributeError: no layer before setup; load them"):
        state.restore(trainer)
    assert (trainer.state, trainer.callback_metrics) == ("finished", {"loss": 0.5})


def test_a_trainer_predicts_after_fit_but_fits_only_once(results):
    assert results["predictions"] == pytest.approx(results["expected_predictions"])
    assert results["fit_again"].startswith("NotImplementedError: this Trainer has fit a model already")


def test_sharded_weights_come_back_whole(results):
    assert results["sharded"] == results["plain"][0]
    assert results["checkpoint"] == [results["folder"] + "/checkpoints", True]
    assert any(
        re.fullmatch(r"the caller's Sharded differs from .*: more\.weight, more\.bias; load them from a checkpoint", warning)
        for warning in results["warned"]
    )


def test_predict_before_fit_does_not_set_the_checkpoint_folder(results):
    assert results["dirpath_before_fit"] is None


def test_metrics_are_those_of_the_last_run(results):
    assert results["metrics_after_predict"] == {}


def test_fabric_launches_functions_and_nothing_else(results):
    assert results["fabric"] == [0, 30.0, "an argument of the function's own", results["me"]]
    assert results["fabric_alone"].startswith("TypeError: To spawn processes with the `DDPStrategy` strategy")


def test_a_copy_of_a_trainer_is_watched_too(results):
    assert results["copied"] == [True, True]


def test_bad_strategies_and_options_raise_at_once(results):
    errors = results["errors"]
    for name in ("name", "class", "one process"):
        assert errors.pop(name).startswith("TypeError: watched() takes an instance of one of Lightning's strategies")
    expected = {
        "used": "ValueError: the strategy belongs to a Trainer or Fabric already",
        "option": "TypeError: watched() has no option 'backend'; its options are env, ",
        "value": "ValueError: timeout must be a number of seconds, more than 0, not -1",
        "scope": "ValueError: restart_policy has scope='worker'",
        "logs": "ValueError: logs: show names rank 2",
        "nodes": "ValueError: watched() starts ranks on one machine, but num_nodes=2",
        "sending": "LaunchError: args[0].lock, a _thread.lock, which cannot be sent to the ranks",
    }
    assert errors.keys() == expected.keys()
    for name, text in expected.items():
        assert errors[name].startswith(text)


def test_environment_and_temporary_folder_are_unchanged(results):
    assert results["environment"] == {}
    assert [name for name in results["temporary"] if not name.startswith("torchinductor_")] == []  # a cache of torch's own


def test_the_example_learns_the_digits():
    out = python(str(EXAMPLES / "lightning_digits.py"), env=QUIET).stdout
    assert float(re.search(r"after 8 epochs on 2 ranks: loss ([\d.]+)", out)[1]) < 0.2
    assert float(re.search(r"test accuracy: ([\d.]+)%", out)[1]) >= 95


def test_a_trainer_in_a_notebook():
    kernel = Kernel()
    try:
        kernel.run(CELL)
        assert kernel.value("before < after < 1, trainer.global_step, trainer.state.finished") == (True, 4, True)
    finally:
        kernel.close()


@dataclass
class ProgramEnd:
    """How misfortune.py ended."""

    output: str
    status: int
    seconds: float  # from the failure to the end of the program
    raised: float | None  # seconds from the failure to the caller's exception
    left: list[str]  # commands of processes that are left, except multiprocessing's resource tracker


@pytest.fixture(scope="module", params=["watched", "ddp", "ddp_spawn"])
def ends(request):
    """Run the program for each failure of rank 1, while rank 0 is busy. Return the ends by failure."""
    failures = (*FAILURES, *WATCHED_ONLY) if request.param == "watched" else FAILURES
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(failures, pool.map(partial(run_program, request.param), failures), strict=True))
    for failure, end in found.items():
        raised = "" if end.raised is None else f" (raised after {end.raised:.2f} s)"
        print(f"{request.param:10} {failure:7} {end.seconds:5.2f} s, status {end.status}, left: {end.left}{raised}")
    return request.param, found


def test_a_failure_of_rank_1_ends_the_program_at_once_and_is_reported(ends):
    launcher, found = ends
    if launcher == "watched":
        assert [end.status for end in found.values()] == [1, 128 + signal.SIGKILL, 3, 1]
        assert all(end.raised < 2 for failure, end in found.items() if failure in FAILURES)
        assert all(end.seconds < 5 for end in found.values())
        assert "\nrank 1 failed first: BadShardError: shard 1 has 17 columns, not 16" in found["raises"].output
        assert "\nthe exception itself: True 17 explained by the strategy\n" in found["raises"].output
        assert "\nrank 1 was killed by SIGKILL" in found["killed"].output
        assert "\nrank 1 ended with exit code 3" in found["exits"].output
        assert "\nCtrl-C works as before: True\n" in found["interrupted"].output
        assert not any(end.left for end in found.values())
        assert not any("Received SIGTERM" in end.output for end in found.values())  # Lightning's handler prints it
    elif launcher == "ddp":  # it polls every five seconds, then kills all processes, the caller first
        assert [end.status for end in found.values()] == [-signal.SIGKILL] * 3
        assert all(end.seconds < 5 + 3 for end in found.values())
        for code, end in zip((1, -signal.SIGKILL, 3), found.values(), strict=True):
            assert f"terminated with code {code}. Forcefully terminating all other processes" in end.output
    else:  # ddp_spawn: the status does not depend on the rank's
        assert [end.status for end in found.values()] == [1, 1, 1]
        assert "\ntorch.multiprocessing.spawn.ProcessRaisedException" in found["raises"].output  # the type is lost
        assert "process 1 terminated with signal SIGKILL" in found["killed"].output
        assert "process 1 terminated with exit code 3" in found["exits"].output


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
