"""Runs with torch: process groups, tensors, DataLoaders and torch.save, with real gloo on this CPU."""

import multiprocessing
import os
import re
import resource
import signal
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpwatch
from support import failing
from support.programs import in_own_process
from support.runs import failed
from support.thoroughness import THOROUGH

SPAWN = multiprocessing.get_context("spawn")
MANY = 1 << 18  # numbers, which are more than what is copied


def all_reduce():
    total = torch.full((4,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_backend(), dist.get_world_size(), float(total[0])


@pytest.fixture(scope="module")
def gloo_ranks():
    """Two ranks that keep torch and their process group. Only for tests in which all ranks live on."""
    with mpwatch.WorkerGroup(2, backend="gloo") as group:
        group.run(all_reduce)
        yield group


# ---- Process groups


def test_the_process_group_is_made_and_its_store_listens_on_the_loopback_interface_only(gloo_ranks):
    def find_listening_addresses():
        port = f":{mpwatch.current_worker().master_port:04X}"
        lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
        return [local.removesuffix(port) for _, local, _, state, *_ in lines if local.endswith(port) and state == "0A"]

    assert list(gloo_ranks.run(all_reduce)) == [("gloo", 2, 3.0)] * 2
    assert gloo_ranks.run(find_listening_addresses)[0] == ["0100007F"]  # 127.0.0.1


def is_kept():
    """Return whether the process group is that of the previous call."""
    dist.all_reduce(torch.ones(1))
    state = mpwatch.current_worker().state
    previous, state["group"] = state.get("group"), dist.group.WORLD
    return previous is dist.group.WORLD


def test_ranks_keep_their_process_group_from_call_to_call_and_have_a_new_one_after_an_exception(gloo_ranks):
    def raise_on_rank_1():
        if dist.get_rank() == 1:
            raise ValueError("bad")

    assert [list(gloo_ranks.run(is_kept)) for _ in range(2)] == [[False, False], [True, True]]
    with pytest.raises(mpwatch.RunFailedError, match="bad"):
        gloo_ranks.run(raise_on_rank_1)
    assert list(gloo_ranks.run(is_kept)) == [False, False]
    for _ in range(3):  # each call makes a new process group. A rank that leaves it at once disturbs no other rank
        gloo_ranks.run(dist.destroy_process_group)
    assert list(gloo_ranks.run(is_kept)) == [False, False]
    assert [worker.restart_count for worker in gloo_ranks.workers] == [0, 0]


@pytest.mark.slow
def test_some_ranks_have_the_process_group_of_all():
    """A call of all ranks makes it, and must make it again if a rank was lost."""

    def receive():
        dist.recv(tensor := torch.zeros(1), 0)
        return tensor.item()

    def get_size_and_rank():
        return dist.get_world_size(), dist.get_rank()

    def check_missing(group):
        with pytest.raises(mpwatch.RunFailedError, match="Default process group has not been initialized") as caught:
            group.run(get_size_and_rank, ranks=0)
        assert "if all ranks are called" in caught.value.__cause__.__notes__[0]

    with mpwatch.WorkerGroup(2, backend="gloo") as group:
        check_missing(group)
        assert list(group.run(is_kept)) == [False, False]
        sender, receiver = group.submit(lambda: dist.send(torch.ones(1), 1), ranks=0), group.submit(receive, ranks=1)
        assert (list(receiver.result(60).values()), list(sender.result(60).values())) == ([1.0], [None])  # at the same time
        bad, *handles = [
            group.submit(failing.raises_value_error, ranks=1),
            *(group.submit(get_size_and_rank, ranks=rank) for rank in (0, 1, 0)),
        ]
        with pytest.raises(mpwatch.RunFailedError, match="the batch is bad"):
            bad.result(60)
        assert [list(handle.result(60).values()) for handle in handles] == [[(2, 0)], [(2, 1)], [(2, 0)]]
        assert list(group.run(is_kept)) == [True, True]
        with pytest.raises(mpwatch.RunFailedError, match="SIGKILL"):
            group.run(failing.is_killed, ranks=1)
        check_missing(group)
        assert list(group.run(is_kept)) == [False, False]
        assert list(group.run(get_size_and_rank, ranks=0).values()) == [(2, 0)]


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


@pytest.mark.parametrize(
    ("fail", "order", "nprocs"),
    [
        (failing.raises_value_error, "peers first", 3),
        (failing.is_killed, "cause first", 3),
        pytest.param(failing.raises_value_error, "cause first", 3, marks=pytest.mark.slow),
        pytest.param(failing.is_killed, "peers first", 3, marks=pytest.mark.slow),
        pytest.param(failing.raises_value_error, "peers first", 8, marks=THOROUGH),
        pytest.param(failing.is_killed, "cause first", 8, marks=THOROUGH),
    ],
)
def test_the_first_failure_is_the_root_cause_and_peers_that_lose_it_are_victims(fail, order, nprocs):
    error = failed(fails_in_a_collective, nprocs, args=(fail, order, SPAWN.Event()), backend="gloo")
    assert error.root_cause.rank == 1, str(error)
    assert isinstance(error.__cause__, ValueError) == (fail is failing.raises_value_error)
    assert all(failure.is_secondary for rank, failure in error.result.failures.items() if rank != 1), str(error)
    if order == "peers first":
        assert " of rank 1: StepError" in str(error)


# ---- Tensors as arguments and return values


def is_mapped(tensor):
    """Return whether it is in memory that mpwatch has mapped in this process."""
    maps = Path("/proc/self/maps").read_text()
    found = re.findall(r"^(\S+)-(\S+) .*[:/]mpwatch-\S+ \(deleted\)$", maps, re.MULTILINE)
    return any(int(begin, 16) <= tensor.data_ptr() < int(end, 16) for begin, end in found)


def send_back(thing):
    return thing


def test_tensors_of_any_type_arrive_and_large_ones_are_not_copied(gloo_ranks):
    def look_and_send_back(tensors):
        return [is_mapped(tensor) for tensor in tensors], tensors

    types = (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn)
    tensors = [torch.arange(size).to(dtype) for dtype in types for size in (0, 1, MANY)]
    for tensor in tensors:
        tensor.scale = 0.5
    are_mapped, back = gloo_ranks.run(look_and_send_back, (tensors,))[0]
    assert are_mapped == [is_mapped(tensor) for tensor in back] == [len(tensor) > 1 for tensor in tensors]
    for sent, came in zip(tensors, back, strict=True):
        assert (came.dtype, came.shape, came.scale) == (sent.dtype, sent.shape, 0.5)
        assert torch.equal(came.view(torch.uint8), sent.view(torch.uint8))
        came.zero_()


@pytest.mark.parametrize("size", [2, MANY])
def test_tensors_of_one_memory_share_it_in_the_rank_and_after_their_return(gloo_ranks, size):
    def add_one(tensors):
        tensors[0].add_(1)
        return tensors

    whole = torch.zeros(2 * size)
    views = [whole, whole, whole[size:], whole.view(2, -1)[:, 1], whole.detach()]
    came, again, half, column, twin = gloo_ranks.run(add_one, (views,))[0]
    assert again is came
    assert set(half.tolist()) == set(column.tolist()) == set(twin.tolist()) == {1.0}
    came.fill_(3)
    assert half.storage_offset() == size
    assert set(half.tolist()) == set(column.tolist()) == set(twin.tolist()) == {3.0}
    assert set(whole.tolist()) == {0.0}


def test_modules_keep_tied_weights_and_references_to_them(gloo_ranks):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.BatchNorm1d(256))
    model[1].weight = model[0].weight
    momenta = {weight: torch.ones_like(weight) for weight in model.parameters()}  # as an optimizer has them
    came, its_momenta = gloo_ranks.run(send_back, ((model, momenta),))[0]
    assert came[1].weight is came[0].weight
    assert isinstance(came[0].weight, nn.Parameter)
    assert list(its_momenta) == list(came.parameters())
    assert all(torch.equal(a, b) for a, b in zip(came.state_dict().values(), model.state_dict().values(), strict=True))
    came(torch.eye(256)).sum().backward()
    assert came[0].weight.grad is not None


@pytest.mark.filterwarnings("ignore")  # torch warns that quantization is deprecated
def test_special_tensors_arrive(gloo_ranks):
    sparse, rows = torch.eye(300).to_sparse(), torch.eye(300).to_sparse_csr()
    quantized = torch.quantize_per_tensor(torch.arange(float(MANY)), 0.5, 10, torch.quint8)
    sent = (sparse, rows, quantized, torch.empty(3, device="meta"), torch.arange(10).untyped_storage(), torch.zeros(2))
    back = gloo_ranks.run(send_back, (sent,))[0]
    assert torch.equal(back[0].to_dense(), sparse.to_dense())
    assert torch.equal(back[1].to_dense(), rows.to_dense())
    assert torch.equal(back[2].int_repr(), quantized.int_repr())
    assert back[3].device.type == "meta"
    assert back[4].tolist()[::8] == list(range(10))
    assert back[5].resize_(1000).shape == (1000,)  # small ones can be resized


def test_tensors_in_shared_memory_stay_shared(gloo_ranks):
    shared, private = torch.zeros(3).share_memory_(), torch.zeros(3)
    model = nn.Linear(2, 1).share_memory()

    def add(shared, private, model):
        rank = dist.get_rank()
        shared[rank] += 1
        private += 1
        with torch.no_grad():
            model.weight[0, rank] = 7.0 + rank
        return private, shared

    values = list(gloo_ranks.run(add, (shared, private, model)))
    assert shared.tolist() == [1, 1, 0]
    assert model.weight.tolist() == [[7.0, 8.0]]
    assert private.tolist() == [0, 0, 0]
    assert [private.tolist() for private, _ in values] == [[1, 1, 1]] * 2
    assert not any(tensor.is_shared() for value in values for tensor in value)


@pytest.mark.slow
@in_own_process
def test_more_small_tensors_than_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    tensors = [torch.full((3,), float(n)) for n in range(2000)]
    for values in mpwatch.run(lambda tensors: [tensor + 1 for tensor in tensors], 2, args=(tensors,)):
        assert all(torch.equal(value, tensor + 1) for value, tensor in zip(values, tensors, strict=True))


# ---- What training scripts do


def test_report_accepts_numbers_of_numpy_and_torch(gloo_ranks):
    def work():
        loss = torch.ones(1, requires_grad=True)
        mpwatch.report(step=numpy.int64(3), loss=loss, lr=numpy.float32(0.5), **{numpy.str_("size"): numpy.ones((1, 1))})
        with pytest.raises(TypeError, match=r"report\(\) takes numbers; loss is a Tensor"):
            mpwatch.report(loss=torch.ones(2))

    progress = gloo_ranks.run(work).progress[0]
    assert (progress.step, progress.metrics) == (3, {"loss": 1.0, "lr": 0.5, "size": 1.0})


@pytest.mark.slow
def test_thread_pools_and_compilers_follow_the_cpus_of_the_rank(monkeypatch):
    def get_thread_counts():
        """Return how many threads torch and NumPy use, and how many processes torch would start to compile."""
        import numpy  # noqa: F401  it loads its pool
        import threadpoolctl
        from torch._inductor import config

        pools = {pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
        return torch.get_num_threads(), pools, config.compile_threads

    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    allowed = sorted(os.sched_getaffinity(0))
    assert mpwatch.run(get_thread_counts, 1, placement=lambda _: allowed[:1])[0] == (1, {1}, 1)
    share = max(1, len(allowed) // 2)
    assert [processes for *_, processes in mpwatch.run(get_thread_counts, 2)] == [min(32, share)] * 2


@pytest.mark.slow
def test_the_death_of_a_rank_is_reported_while_its_data_loader_workers_live():
    def iterate():
        """Let the workers become idle first: a worker that is killed while it shares a tensor leaves a file of torch.

        They are forks. For the others, multiprocessing keeps named semaphores until the host program ends.
        """
        data = torch.utils.data.TensorDataset(torch.arange(4))
        loader = torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork")
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        dist.barrier()
        if dist.get_rank() == 1:
            failing.is_killed()
        signal.pause()

    assert "rank 1 was killed by SIGKILL" in str(failed(iterate, 2, backend="gloo"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_names_what_works():
    assert '"gloo", or "auto"' in str(failed(dist.get_rank, 1, backend="nccl"))


def test_a_collective_without_a_process_group_says_how_to_have_one():
    assert "backend=" in failed(dist.barrier, 1).__cause__.__notes__[0]
