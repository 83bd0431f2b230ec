"""Runs with torch: process groups, shared tensors, DataLoaders and torch.save, with real gloo on this CPU."""

import multiprocessing
import os
import signal
import sys
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpwatch
from mpwatch import WorkerSpec
from support.programs import python

SPAWN = multiprocessing.get_context("spawn")


def all_reduce():
    total = torch.full((4,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_backend(), dist.get_world_size(), float(total[0])


@pytest.mark.parametrize("backend", ["gloo", "auto"])
def test_the_process_group_is_initialized(backend):
    expected = "gloo" if backend == "gloo" or not torch.cuda.is_available() else "nccl"
    assert list(mpwatch.run(all_reduce, 3, backend=backend)) == [(expected, 3, 6.0)] * 3


def test_report_accepts_numbers_of_numpy_and_torch():
    def work():
        loss = torch.ones(1, requires_grad=True)
        mpwatch.report(step=numpy.int64(3), loss=loss, lr=numpy.float32(0.5), **{numpy.str_("size"): numpy.ones((1, 1))})
        with pytest.raises(TypeError, match=r"report\(\) takes numbers; loss is a Tensor"):
            mpwatch.report(loss=torch.ones(2))

    progress = mpwatch.run(work, 1).progress[0]
    assert (progress.step, progress.metrics) == (3, {"loss": 1.0, "lr": 0.5, "size": 1.0})


def test_a_function_may_destroy_the_group_or_make_its_own():
    mpwatch.run(dist.destroy_process_group, 2, backend="gloo")

    def own():
        dist.init_process_group("gloo")
        try:
            return all_reduce()[2]
        finally:
            dist.destroy_process_group()

    assert list(mpwatch.run(own, 2)) == [3.0, 3.0]


def test_the_store_serves_other_ranks_after_rank_0_has_returned():
    def use():
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank():
            return store.get("rank 0 is about to return")
        store.set("rank 0 is about to return", "yes")
        return None

    assert list(mpwatch.run(use, 3, backend="gloo")) == [None, b"yes", b"yes"]


class StepError(Exception):
    """An error of a victim. The root cause fails only when this error is pickled, which is after its time was recorded."""

    def __reduce__(self):
        _peer_has_failed.set()
        return StepError, self.args


def fails_in_a_collective(fail, order, peer_has_failed):
    global _peer_has_failed
    _peer_has_failed = peer_has_failed
    dist.barrier()
    if dist.get_rank() == 1:
        if order == "peers first":  # the peers see the closed connections before the root cause is reported
            dist.destroy_process_group()
            peer_has_failed.wait()
        fail()
    try:
        dist.all_reduce(torch.ones(1000))
    except RuntimeError as error:
        if order == "peers first":
            raise StepError("the step failed") from error
        raise


def raise_value_error():
    raise ValueError("the batch is bad")


def kill_itself():
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize(
    ("fail", "order", "nprocs"),
    [
        *((fail, order, 3) for fail in (raise_value_error, kill_itself) for order in ("cause first", "peers first")),
        pytest.param(raise_value_error, "peers first", 8, marks=pytest.mark.slow),
        pytest.param(kill_itself, "cause first", 8, marks=pytest.mark.slow),
    ],
)
def test_the_first_failure_is_the_root_cause_and_peers_that_lose_it_are_victims(fail, order, nprocs):
    with pytest.raises(mpwatch.RunFailedError) as caught:
        mpwatch.run(fails_in_a_collective, nprocs, args=(fail, order, SPAWN.Event()), backend="gloo")
    error = caught.value
    assert error.root_cause.rank == 1, str(error)
    assert isinstance(error.__cause__, ValueError) == (fail is raise_value_error)
    assert all(failure.is_secondary for rank, failure in error.failures.items() if rank != 1), str(error)
    if order == "peers first":
        assert "a victim of rank 1: StepError" in str(error)


def test_a_rank_that_exits_with_0_leaves_the_process_group():
    def leave():
        dist.barrier()  # both ranks have joined
        if dist.get_rank() == 0:
            sys.exit(0)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            return "gloo" in str(error)

    assert list(mpwatch.run(leave, 2, backend="gloo", timeout=60)) == [None, True]


def test_an_unknown_backend_is_a_failure_of_the_ranks():
    with pytest.raises(mpwatch.RunFailedError, match=r"(?i)backend") as caught:
        mpwatch.run(all_reduce, 2, backend="no-such-backend")
    assert caught.value.root_cause.kind is mpwatch.FailureKind.EXCEPTION


def test_tensors_in_shared_memory_stay_shared():
    shared, private = torch.zeros(3).share_memory_(), torch.zeros(3)
    model = nn.Linear(2, 1).share_memory()

    def add(shared, private, model):
        rank = dist.get_rank()
        shared[rank] += 1
        private += 1
        with torch.no_grad():
            model.weight[0, rank] = 7.0 + rank
        return private

    values = mpwatch.run(add, 2, args=(shared, private, model), backend="gloo")
    assert shared.tolist() == [1, 1, 0]
    assert model.weight.tolist() == [[7.0, 8.0]]
    assert private.tolist() == [0, 0, 0]
    assert not private.is_shared()
    assert [value.tolist() for value in values] == [[1, 1, 1]] * 2


def test_tied_weights_stay_tied_and_special_tensors_arrive():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    sparse = torch.eye(3).to_sparse()
    needs_grad = torch.ones(2, requires_grad=True)

    def inspect(model, sparse, needs_grad, typed):
        return model[0].weight is model[1].weight, float(sparse.to_dense().sum()), needs_grad.requires_grad, len(typed)

    args = (nn.Sequential(first, second), sparse, needs_grad, torch.ones(5).untyped_storage())
    assert mpwatch.run(inspect, 1, args=args)[0] == (True, 3.0, True, 20)


def test_the_death_of_a_rank_with_data_loader_workers_is_reported_at_once():
    def iterate():
        """Let the workers become idle first: a worker that is killed while it shares a tensor leaves a file of torch."""
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4)), num_workers=2)
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        dist.barrier()
        if dist.get_rank() == 1:
            kill_itself()
        signal.pause()

    start = time.monotonic()
    with pytest.raises(mpwatch.RunFailedError, match="rank 1 was killed by SIGKILL"):
        mpwatch.run(iterate, 2, backend="gloo")
    assert time.monotonic() - start < 30


SCRIPT = """
import io, sys
import torch
from torch.utils.data import DataLoader, Dataset
import mpwatch

class Cfg:
    def __init__(self, lr):
        self.lr = lr

    class Inner:
        pass

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.tensor(i)

def collate(items):
    return torch.stack(items).sum()

def train(cfg):
    saved = io.BytesIO()
    torch.save({"cfg": cfg, "inner": Cfg.Inner()}, saved)
    sums = {}
    for method in ("fork", "spawn", "forkserver", None):
        loader = DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context=method, collate_fn=collate)
        sums[method] = [int(batch) for batch in loader]
    return saved.getvalue(), sums

if __name__ == "__main__":
    for saved, sums in mpwatch.run(train, 2, args=(Cfg(0.5),)):
        back = torch.load(io.BytesIO(saved), weights_only=False)
        assert type(back["cfg"]) is Cfg and back["cfg"].lr == 0.5
        assert type(back["inner"]) is Cfg.Inner
        assert sums == dict.fromkeys(("fork", "spawn", "forkserver", None), [6, 22])
    print("done")
"""


def test_torch_save_and_data_loaders_find_the_classes_of_the_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python("-W", "ignore", "script.py", cwd=tmp_path)
    assert done.stdout == "done\n"


def test_options_may_be_numpy_numbers():
    assert WorkerSpec(fn=print, nprocs=numpy.int64(3), timeout=numpy.float32(2.5)).nprocs == 3
    with pytest.raises(TypeError, match="nprocs must be an int"):
        WorkerSpec(fn=print, nprocs=numpy.array([1, 2]))


def test_arrays_are_arguments_and_return_values():
    array = numpy.arange(1 << 20, dtype="float32")
    for rank, back in enumerate(mpwatch.run(lambda a: a + mpwatch.current_worker().rank, 2, args=(array,))):
        numpy.testing.assert_array_equal(back, array + rank)
