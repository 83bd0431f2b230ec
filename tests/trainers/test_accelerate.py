"""Tests of Hugging Face accelerate in ranks of mpwatch, with what replaces the parameters of its `notebook_launcher`."""

import os

import pytest

import mpwatch
from mpwatch import cluster
from support.ports import free_port
from support.programs import ENV, call

QUIET = {**ENV, "PYTHONWARNINGS": "ignore"}


def get_accelerate_info():
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    total = float(accelerator.reduce(torch.tensor([accelerator.process_index + 1.0])))
    return accelerator.num_processes, accelerator.process_index, accelerator.device.type, accelerator.state.backend, total


def test_accelerate_finds_the_ranks_of_a_plain_run():
    assert list(mpwatch.run(get_accelerate_info, 2)) == [(2, rank, "cpu", "gloo", 3.0) for rank in range(2)]


def launch_after_an_accelerator(port):
    """accelerate's own launcher must fail in a process that has an Accelerator."""
    from accelerate import Accelerator, notebook_launcher

    def train(step):
        import torch

        accelerator = Accelerator()
        with accelerator.autocast():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        return accelerator.num_processes, str(product.dtype), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], step

    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="should only be initialized inside your training function"):
        notebook_launcher(train, (7,), num_processes=2)
    env = {"ACCELERATE_MIXED_PRECISION": "bf16", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    values = mpwatch.run(train, 2, args=(7,), env=env)
    assert list(values) == [(2, "torch.bfloat16", "localhost", str(port), 7)] * 2


@pytest.mark.slow
def test_an_accelerator_in_the_caller_does_no_harm():
    call(launch_after_an_accelerator, free_port(), env=QUIET)


def launch_on_two_nodes():
    """The nodes are threads of this process, as those of `mpwatch.integrations.ray.run` are processes of Ray."""
    values = cluster.run(cluster.ThreadEngine(), get_accelerate_info, 1, nodes=2, node_timeout=60.0)
    assert list(values) == [(2, rank, "cpu", "gloo", 3.0) for rank in range(2)]


@pytest.mark.slow
def test_accelerate_starts_ranks_on_two_nodes():
    call(launch_on_two_nodes, env=QUIET)
