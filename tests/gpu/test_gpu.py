"""What mpwatch does with a GPU: one card is enough, and at most eight minutes. CONTRIBUTING.md has the command."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch

import mpwatch
from mpwatch import FailureKind
from support.programs import call
from support.runs import failed

MIB = 1 << 20
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU"),
]


# --- Starts, devices and process groups


@pytest.mark.parametrize("nprocs", ["gpu", "auto"])
def test_there_is_a_rank_for_each_gpu_and_it_sees_only_that(nprocs):
    def look():
        return torch.cuda.device_count(), torch.zeros(1, device="cuda").device.index

    assert list(mpwatch.run(look, nprocs, placement=mpwatch.Placement(gpus="own"))) == [(1, 0)] * torch.cuda.device_count()


@pytest.mark.parametrize(("backend", "nprocs", "name"), [("auto", 1, "nccl"), ("gloo", 4, "gloo")])
def test_a_process_group_reduces_cuda_tensors(backend, nprocs, name):
    def reduce():
        value = torch.ones(3, device="cuda")
        torch.distributed.all_reduce(value)
        return torch.distributed.get_backend(), value.sum().item()

    assert list(mpwatch.run(reduce, nprocs, backend=backend)) == [(name, 3.0 * nprocs)] * nprocs


# --- CUDA tensors on their way


def test_cuda_tensors_are_arguments_results_and_parts_of_exceptions():
    class Diverged(Exception):
        pass

    def add(tensor, own):
        return (tensor + own).cpu(), tensor.device.type

    def fail(tensor):
        raise Diverged(tensor.sum().item(), tensor * 2)

    tensor = torch.arange(4.0, device="cuda")
    values = mpwatch.run(add, 2, args=(tensor, mpwatch.PerRank([tensor, tensor * 2])))
    assert [value.tolist() for value, _ in values] == [[0, 2, 4, 6], [0, 3, 6, 9]]
    assert {device for _, device in values} == {"cuda"}
    error = failed(fail, 1, args=(tensor,))
    assert type(error.__cause__).__name__ == "Diverged"
    assert error.__cause__.args[0] == 6.0


def test_a_result_on_the_gpu_arrives_or_says_what_to_do():
    def make():
        return torch.ones(4, device="cuda")

    result = mpwatch.run(make, 1, check=False)
    if result.state is mpwatch.WorkerState.SUCCEEDED:
        assert result[0].sum().item() == 4
    else:
        assert re.search(r"cpu\(\)", result.verdict), result.verdict


def use_the_gpu_in_ranks_only():
    def use():
        return torch.ones(1, device="cuda").item()

    print(list(mpwatch.run(use, 2)), torch.cuda.is_initialized())


def test_the_caller_has_no_cuda_context():
    assert call(use_the_gpu_in_ranks_only).stdout == "[1.0, 1.0] False\n"


# --- Failures


def test_out_of_memory_on_the_gpu_says_how_much_was_asked(record_property):
    def ask_for_too_much():
        torch.empty(torch.cuda.mem_get_info()[1] * 2, dtype=torch.uint8, device="cuda")

    error = failed(ask_for_too_much, 1)
    record_property("verdict", str(error).splitlines()[0][:160])
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert re.search(r"Tried to allocate [\d.]+ GiB", str(error))


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_device_side_assert_names_its_line(is_blocking, record_property):
    def look_up():
        table = torch.nn.Embedding(4, 2, device="cuda")
        rows = table(torch.tensor([7], device="cuda"))  # the wrong line
        return rows.sum().item()

    error = failed(look_up, 1, env={"CUDA_LAUNCH_BLOCKING": "1"} if is_blocking else {})
    record_property("verdict", str(error).splitlines()[0][:160])
    assert "device-side assert" in str(error)
    assert "CUDA_LAUNCH_BLOCKING" in str(error.__cause__)
    if is_blocking:
        assert "the wrong line" in error.root_cause.traceback


def test_a_kernel_that_never_ends_is_killed_and_its_memory_is_free_before_the_restart(record_property):
    def hang_once():
        block = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.7), dtype=torch.uint8, device="cuda")
        if mpwatch.current_worker().restart_count == 0:
            mpwatch.heartbeat()
            torch.cuda._sleep(10**13)
            torch.cuda.synchronize()
        return block.numel()

    result = mpwatch.run(hang_once, 1, heartbeat_timeout=5, grace_period=2, max_restarts=1)
    first = result.attempts[0].root_cause
    record_property("stack", first.stack.splitlines()[1].strip() if first.stack else "none")
    assert first.kind is FailureKind.HANG
    assert "synchronize" in first.stack


def test_a_rank_killed_in_a_launch_leaves_no_memory(record_property):
    def die_launching():
        block = torch.ones(256 * MIB, device="cuda")
        if mpwatch.current_worker().restart_count == 0:
            for _ in range(100):
                block.mul_(1.0001)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    before, _ = torch.cuda.mem_get_info()
    (pid,) = mpwatch.run(die_launching, 1, max_restarts=1)
    left = before - torch.cuda.mem_get_info()[0]
    record_property("left", f"{max(0, left) // MIB} MiB")
    assert left < 64 * MIB
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        assert str(pid) not in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_a_collective_of_nccl_is_named():
    def wait_alone():
        torch.distributed.all_reduce(torch.ones(3, device="cuda"))
        mpwatch.heartbeat()
        time.sleep(600)

    error = failed(wait_alone, 1, backend="nccl", heartbeat_timeout=5)
    assert error.result.collectives[0].name == "all_reduce"
    assert error.result.collectives[0].backend == "nccl"


# --- A warm group, compiled functions, helpers


def test_a_warm_group_keeps_its_cuda_state(record_property):
    def keep(tensor):
        state = mpwatch.current_worker().state
        state.setdefault("weights", torch.zeros(4, device="cuda")).add_(tensor.cuda())
        return state["weights"].cpu()

    with mpwatch.WorkerGroup(2) as group:
        group.run(keep, (torch.ones(4),))
        began_at = time.perf_counter()
        for _ in range(100):
            result = group.run(keep, (torch.ones(4),))
        record_property("call", f"{(time.perf_counter() - began_at) * 10:.2f} ms")
    assert result[0].tolist() == [101.0] * 4


def test_a_compiled_function_leaves_no_compiler():
    def compile_and_call():
        double = torch.compile(lambda x: x * 2 + 1)
        return double(torch.ones(64, device="cuda")).sum().item()

    assert list(mpwatch.run(compile_and_call, 2)) == [192.0, 192.0]


def test_pinned_batches_of_killed_loaders():
    def load():
        data = torch.utils.data.TensorDataset(torch.ones(64, 8))
        loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, pin_memory=True, persistent_workers=True)
        return sum(batch.cuda(non_blocking=True).sum().item() for (batch,) in loader)

    def load_and_die():
        load()
        os.kill(os.getpid(), signal.SIGKILL)

    assert list(mpwatch.run(load, 2)) == [512.0, 512.0]
    assert failed(load_and_die, 2).root_cause.kind is FailureKind.SIGNAL


# --- Trainers


@pytest.mark.parametrize("package", ["lightning", "transformers"])
def test_a_trainer_trains_two_steps(package, tmp_path):
    def train_with_lightning():
        from lightning.pytorch import Trainer
        from lightning.pytorch.demos import BoringModel

        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(accelerator="gpu", devices=1, max_steps=2, **quiet)
        trainer.fit(BoringModel())
        return trainer.strategy.root_device.type

    def train_with_transformers():
        from trainers.test_transformers import train

        *_, device = train(str(tmp_path), 2)["place"]
        return device

    pytest.importorskip(package)
    train = {"lightning": train_with_lightning, "transformers": train_with_transformers}[package]
    assert list(mpwatch.run(train, 1)) == ["cuda"]
