"""Tests of Hugging Face accelerate in ranks of mpwatch: in a plain run, and by mpwatch's `notebook_launcher`."""

import inspect
import os
from functools import partial

import pytest

import mpwatch
from mpwatch import cluster
from mpwatch.integrations.accelerate import notebook_launcher
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


def use_both_launchers(port):
    """accelerate's own launcher must fail in a process that has an Accelerator."""
    from accelerate import Accelerator
    from accelerate import notebook_launcher as accelerates_launcher

    def train(step):
        import torch

        accelerator = Accelerator()
        with accelerator.autocast():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        return accelerator.num_processes, str(product.dtype), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], step

    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="should only be initialized inside your training function"):
        accelerates_launcher(train, (7,), num_processes=2)
    values = notebook_launcher(train, (7,), 2, "BF16", port, "localhost")
    assert list(values) == [(2, "torch.bfloat16", "localhost", str(port), 7)] * 2
    theirs, ours = (
        {
            name: each.default
            for name, each in inspect.signature(launcher).parameters.items()
            if each.kind != each.KEYWORD_ONLY
        }
        for launcher in (accelerates_launcher, notebook_launcher)
    )
    assert [*theirs, "options"] == list(ours)
    # here None means: a free port, this machine
    assert {name for name in theirs if theirs[name] != ours[name]} == {"use_port", "master_addr"}


@pytest.mark.slow
def test_an_accelerator_in_the_caller_does_no_harm_and_the_parameters_are_those_of_accelerates_own_launcher():
    call(use_both_launchers, free_port(), env=QUIET)


def test_the_ranks_own_exception_is_raised_after_the_restarts():
    def fail():
        raise RuntimeError(os.getpid(), mpwatch.current_worker().restart_count)

    with pytest.raises(mpwatch.RunFailedError) as caught:
        notebook_launcher(fail, num_processes=1, max_restarts=1)
    pid, restarts = caught.value.__cause__.args
    assert pid != os.getpid()  # a single rank is a new process, too
    assert caught.value.result.restarts == restarts == 1


def test_the_callers_env_takes_precedence(monkeypatch):
    def get_variables(*names):
        return [os.environ.get(name) for name in names]

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    names = ("ACCELERATE_MIXED_PRECISION", "MASTER_PORT", "MORE")
    env = {"MASTER_PORT": "29877", "MORE": "yes"}
    result = notebook_launcher(get_variables, names, 1, "fp16", use_port="29876", env=lambda worker: env)
    assert result[0] == ["fp16", "29877", "yes"]
    result = notebook_launcher(get_variables, names, 1, "no", use_port="29876", env=env)
    assert result[0] == ["bf16", "29877", "yes"]  # "no" leaves it unchanged


def test_the_template_is_converted_to_a_prefix_of_logs(capfd):
    notebook_launcher(print, ("hello",), 2, log_line_prefix_template="[${role_name}${rank}/${local_rank}]: ")
    assert sorted(capfd.readouterr().out.splitlines()) == ["[default0/0]: hello", "[default1/1]: hello"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 2}, "num_nodes=2: notebook_launcher starts ranks on this machine only; for several nodes use"),
        ({"rdzv_backend": "c10d"}, "rdzv_backend='c10d': ranks on one machine need no rendezvous, and max_restarts works"),
        ({"log_line_prefix_template": "", "logs": mpwatch.LogSpec()}, "log_line_prefix_template and logs were both given"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        notebook_launcher(print, num_processes=1, **arguments)
    assert str(caught.value).startswith(message)


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


def launch_on_two_nodes():
    """The nodes are threads of this process, as those of `mpwatch.integrations.ray.run` are processes of Ray."""
    run = partial(cluster.run, cluster.ThreadEngine(), node_timeout=60.0)
    values = notebook_launcher(get_accelerate_info, num_processes=1, num_nodes=2, run=run)
    assert list(values) == [(2, rank, "cpu", "gloo", 3.0) for rank in range(2)]


@pytest.mark.slow
def test_accelerate_starts_ranks_on_two_nodes():
    call(launch_on_two_nodes, env=QUIET)
