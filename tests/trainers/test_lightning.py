"""Trainer and Fabric of Lightning with watched strategies: what comes back, and how they end, beside Lightning's own."""

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

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "notebook"))

from kernels import Kernel
from programs import ENV, python

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}  # torch warns where Lightning is imported, of what Lightning uses of it
MISFORTUNES = ("raises", "killed", "exits")
OURS_ALONE = ("interrupted",)
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
PATIENCE = 90.0  # seconds that a program may take


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What tests/trainers/fitting.py has to tell."""
    folder, temporary = tmp_path_factory.mktemp("fitting"), tmp_path_factory.mktemp("temporary")
    out = python(str(HERE / "fitting.py"), cwd=folder, env={**QUIET, "TMPDIR": str(temporary)}).stdout
    return {**json.loads(out.splitlines()[-1]), "folder": str(folder), "temporary": os.listdir(temporary)}


def test_ranks_that_start_again_from_the_last_checkpoint_train_what_undisturbed_ranks_do_without_a_launcher(told):
    weights, world_size, loss = told["plain"]
    assert world_size == 2
    assert weights != told["first"]
    assert told["fit"]["restarts"] == 1
    assert told["fit"]["weights"] == weights
    assert told["fit"]["metrics"] == [loss] * 3


def test_ranks_are_children_of_the_caller_and_have_its_random_numbers(told):
    witness = told["fit"]["witness"]
    assert witness.pop("random") == told["random"]
    assert witness == {"parent": told["me"], "rank": 0, "local_rank": "0", "port": True, "launcher": None}


def test_the_callers_trainer_is_where_that_of_rank_0_was(told):
    fit = told["fit"]
    assert fit["state"] == ["fit", "finished", None]
    assert (fit["epochs"], fit["steps"], told["saved_steps"]) == (3, 12, 12)
    assert (fit["best"], fit["last"], fit["score"]) == (True, "last.ckpt", fit["metrics"][0])


def test_a_trainer_predicts_after_it_has_fit_but_fits_once(told):
    assert told["predictions"] == pytest.approx(told["expected_predictions"])
    assert told["fit_again"].startswith("NotImplementedError: this Trainer has fit a model already")


def test_weights_that_are_spread_over_the_ranks_come_back_whole(told):
    assert told["sharded"] == told["plain"][0]
    assert told["checkpoint"] == [told["folder"] + "/checkpoints", True]
    (warning,) = told["warned"]
    assert re.fullmatch(
        r"the caller's Sharded differs from .*: more\.weight, more\.bias; load them from a checkpoint", warning
    )


def test_where_checkpoints_go_is_settled_by_fit(told):
    assert told["dirpath_before_fit"] is None


def test_metrics_are_those_of_the_last_run(told):
    assert told["metrics_after_predict"] == {}


def test_fabric_launches_functions_and_nothing_else(told):
    assert told["fabric"] == [0, 30.0, "an argument of the function's own", told["me"]]
    assert told["fabric_alone"].startswith("TypeError: To spawn processes with the `DDPStrategy` strategy")


def test_a_copy_of_a_trainer_is_watched_too(told):
    assert told["copied"] == [True, True]


def test_what_cannot_be_watched_is_refused_at_once(told):
    refusals = told["refusals"]
    for name in ("name", "class", "one process"):
        assert refusals.pop(name).startswith("TypeError: watched() takes an instance of one of Lightning's strategies")
    expected = {
        "used": "ValueError: the strategy belongs to a Trainer or Fabric already",
        "option": "TypeError: watched() has no option 'backend'; there are env, ",
        "value": "ValueError: timeout must be a number of seconds, more than 0, not -1",
        "scope": "ValueError: restart_policy has scope='worker'",
        "logs": "ValueError: logs: show names rank 2",
        "nodes": "ValueError: watched() starts ranks on one machine, but num_nodes=2",
        "sending": "LaunchError: args[0].lock, a _thread.lock, which cannot be sent to the ranks",
    }
    assert refusals.keys() == expected.keys()
    for name, text in expected.items():
        assert refusals[name].startswith(text)


def test_nothing_is_left_of_it(told):
    assert told["environment"] == {}
    assert [name for name in told["temporary"] if not name.startswith("torchinductor_")] == []  # a cache of torch's own


def test_the_example_learns_its_digits():
    out = python(str(EXAMPLES / "lightning_digits.py"), env=QUIET).stdout
    assert float(re.search(r"after 8 epochs on 2 ranks: loss ([\d.]+)", out)[1]) < 0.2
    assert float(re.search(r"test accuracy: ([\d.]+)%", out)[1]) >= 95


def test_a_trainer_of_a_notebook():
    kernel = Kernel()
    try:
        kernel.run(CELL)
        assert kernel.value("before < after < 1, trainer.global_step, trainer.state.finished") == (True, 4, True)
    finally:
        kernel.close()


@dataclass
class End:
    """How misfortune.py ended."""

    said: str
    status: int
    seconds: float  # from the misfortune to the end of the program
    raised: float | None  # from the misfortune to the caller's exception
    left: list[str]  # processes, but for multiprocessing's resource tracker, which ends when it notices


@pytest.fixture(scope="module", params=["watched", "ddp", "ddp_spawn"])
def ends(request):
    """By misfortune; rank 1 has it while rank 0 is busy, and does not talk to it."""
    misfortunes = (*MISFORTUNES, *OURS_ALONE) if request.param == "watched" else MISFORTUNES
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(misfortunes, pool.map(partial(end_of, request.param), misfortunes), strict=True))
    for misfortune, end in found.items():
        raised = "" if end.raised is None else f" (raised after {end.raised:.2f} s)"
        print(f"{request.param:10} {misfortune:7} {end.seconds:5.2f} s, status {end.status}, left: {end.left}{raised}")
    return request.param, found


def test_a_misfortune_of_rank_1_ends_the_program_at_once_and_is_told(ends):
    launcher, found = ends
    if launcher == "watched":
        assert [end.status for end in found.values()] == [1, 128 + signal.SIGKILL, 3, 1]
        assert all(end.raised < 2 for misfortune, end in found.items() if misfortune in MISFORTUNES)
        assert all(end.seconds < 5 for end in found.values())
        assert "\nrank 1 failed first: BadShardError: shard 1 has 17 columns, not 16" in found["raises"].said
        assert "\nthe exception itself: True 17\n" in found["raises"].said
        assert "\nrank 1 was killed by SIGKILL" in found["killed"].said
        assert "\nrank 1 ended with exit code 3" in found["exits"].said
        assert "\nCtrl-C works as before: True\n" in found["interrupted"].said
        assert not any(end.left for end in found.values())
        assert not any(
            "Received SIGTERM" in end.said for end in found.values()
        )  # which Lightning's handler says, and goes on
    elif launcher == "ddp":  # it looks every five seconds, and then kills all processes, the caller first of all
        assert [end.status for end in found.values()] == [-signal.SIGKILL] * 3
        assert all(end.seconds < 5 + 3 for end in found.values())
        for code, end in zip((1, -signal.SIGKILL, 3), found.values(), strict=True):
            assert f"terminated with code {code}. Forcefully terminating all other processes" in end.said
    else:  # whatever the rank's was
        assert [end.status for end in found.values()] == [1, 1, 1]
        assert "\ntorch.multiprocessing.spawn.ProcessRaisedException" in found["raises"].said  # the type is lost
        assert "process 1 terminated with signal SIGKILL" in found["killed"].said
        assert "process 1 terminated with exit code 3" in found["exits"].said


def end_of(launcher, misfortune):
    with tempfile.TemporaryFile("w+") as output:
        program = subprocess.Popen(
            [sys.executable, str(HERE / "misfortune.py"), launcher, misfortune],
            stdout=output,
            stderr=output,
            env=QUIET,
            start_new_session=True,
        )
        try:
            handle = os.pidfd_open(program.pid)
            assert wait([handle], timeout=PATIENCE), "it does not end"
            ended = time.monotonic()
            os.close(handle)
            left = [command for _, command in in_session(program.pid)]
        finally:
            for pid, _ in in_session(program.pid):
                os.kill(pid, signal.SIGKILL)
            program.wait()
        output.seek(0)
        said = output.read()
    at = {what: float(when) for what, when in re.findall(r"^(misfortune|raised)=([\d.]+)$", said, re.MULTILINE)}
    raised = at["raised"] - at["misfortune"] if "raised" in at else None
    return End(said, program.returncode, ended - at["misfortune"], raised, left)


def in_session(leader):
    """The pids and commands of what runs there, but for the resource tracker; what has no command any more is ending."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (entry / "cmdline").read_text().replace("\0", " ")
            if int(session) == leader and state not in "ZX" and command and "resource_tracker" not in command:
                yield int(entry.name), command
