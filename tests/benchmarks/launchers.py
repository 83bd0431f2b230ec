"""One way of launching each, after what its documentation shows first.

An entry of LAUNCH imports what a script that uses it has at its top, before the clock starts, and gives a function
`launch(task, ranks, args)` for the call itself: the values by rank, if it has any to give. Those that can start ranks again
are asked how often they may; those that keep what ranks print are given a folder for it, and show it, too, prefixed. An
entry of WARM is a context with so many ranks that stay, and gives `call(task, *args)`: one call on all of them. One of NODES
is as those of LAUNCH, for one node of several, on each of which it is called.

Nothing in here runs in a rank.
"""

import contextlib
import os
from dataclasses import dataclass

import tasks

__all__ = ["LAUNCH", "NODES", "WARM", "At"]


@dataclass(frozen=True)
class At:
    """A node's place in a job: all nodes are on this machine, and the first one serves the store."""

    node: int
    port: int
    least: int  # nodes
    most: int
    node_timeout: int | None  # seconds; None: what each has by default


def mpwatch(restarts=0, logs=None, **options):
    from mpwatch import run

    if logs:
        from mpwatch import LogSpec

        options["logs"] = LogSpec(logs, prefix="[{rank}] ")
    return lambda task, ranks, args: list(run(task, ranks, args=args, max_restarts=restarts, **options))


def floor():
    """A loop over spawned processes, which brings nothing back and watches nothing."""
    from multiprocessing import get_context

    spawn = get_context("spawn")

    def launch(task, ranks, args):
        processes = [spawn.Process(target=tasks.ranked, args=(rank, task, *args)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        codes = {process.exitcode for process in processes}
        assert codes == {0}, codes

    return launch


def mp_spawn():
    from torch.multiprocessing import spawn

    def launch(task, ranks, args):
        os.environ["WORLD_SIZE"] = str(ranks)
        spawn(tasks.ranked, args=(task, *args), nprocs=ranks)

    return launch


def elastic(restarts=0, logs=None):
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def launch(task, ranks, args):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=restarts,
            monitor_interval=0.1,  # its default
            logs_specs=DefaultLogsSpecs(logs, tee=Std.ALL) if logs else None,
            log_line_prefix_template="[${rank}] ",
        )
        values = elastic_launch(config, task)(*args)
        return [values[rank] for rank in range(ranks)]

    return launch


def torchrunx():
    from torchrunx import Launcher

    def launch(task, ranks, args):
        result = Launcher(hostnames=["localhost"], workers_per_host=ranks, backend=None).run(task, *args)
        return [result.rank(rank) for rank in range(ranks)]

    return launch


def executor():
    """A future for each rank, on a pool for them all."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    spawn = get_context("spawn")

    def launch(task, ranks, args):
        with ProcessPoolExecutor(ranks, mp_context=spawn) as pool:
            futures = [pool.submit(tasks.ranked, rank, task, *args) for rank in range(ranks)]
            return [future.result() for future in futures]

    return launch


LAUNCH = {entry.__name__: entry for entry in (mpwatch, floor, mp_spawn, elastic, torchrunx, executor)}


@contextlib.contextmanager
def warm_mpwatch(ranks, _folder):
    from mpwatch import WorkerGroup

    with WorkerGroup(ranks) as group:
        yield lambda task, *args: list(group.run(task, args=args))


@contextlib.contextmanager
def warm_floor(ranks, _folder):
    """A pipe to each; what to do is not sent at all."""
    from multiprocessing import get_context

    spawn = get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(ranks)]
    processes = [spawn.Process(target=tasks.echo, args=(theirs,)) for _, theirs in pipes]
    for process in processes:
        process.start()

    def call(_task):
        for ours, _ in pipes:
            ours.send(1)
        return [ours.recv() for ours, _ in pipes]

    yield call
    for ours, _ in pipes:
        ours.send(None)
    for process in processes:
        process.join()


@contextlib.contextmanager
def warm_executor(ranks, _folder):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:

        def call(task, *args):
            futures = [pool.submit(task, *args) for _ in range(ranks)]
            return [future.result() for future in futures]

        yield call


@contextlib.contextmanager
def warm_ray(ranks, folder):
    """What is large is put into Ray's store once for all actors, as its documentation advises."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    import ray

    ray.init(num_cpus=ranks, include_dashboard=False, log_to_driver=False, _temp_dir=f"{folder}/ray")
    try:
        kind = ray.remote(tasks.Actor)
        actors = [kind.options(num_cpus=1).remote() for _ in range(ranks)]

        def call(task, *args):
            references = [ray.put(arg) for arg in args]
            return ray.get([getattr(actor, task.__name__).remote(*references) for actor in actors])

        yield call
    finally:
        ray.shutdown()


WARM = {"mpwatch": warm_mpwatch, "floor": warm_floor, "executor": warm_executor, "ray": warm_ray}


def node_of_mpwatch(at):
    import mpwatch.multinode.run  # noqa: F401  as its first call does
    from mpwatch import Rendezvous, run

    settings = {} if at.node_timeout is None else {"node_timeout": at.node_timeout}
    nnodes = at.least, at.most
    meeting = Rendezvous(
        f"127.0.0.1:{at.port}", "job", nnodes, is_host=at.node == 0, local_addr=f"127.0.0.{1 + at.node}", **settings
    )
    return lambda task, ranks, args: run(task, ranks, args=args, rendezvous=meeting, progress=False)


def node_of_elastic(at):
    """With as many restarts as it has by default: it has to use one up for each node that is lost."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = {"is_host": at.node == 0}
    if at.node_timeout is not None:  # at best; and then it waits no longer for others to come
        settings |= {
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": at.node_timeout,
            "last_call_timeout": at.node_timeout,
        }

    def launch(task, ranks, args):
        config = LaunchConfig(
            min_nodes=at.least,
            max_nodes=at.most,
            nproc_per_node=ranks,
            run_id="job",
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{at.port}",
            rdzv_configs=settings,
            local_addr=f"127.0.0.{1 + at.node}",
            max_restarts=3 if at.least < at.most else 0,
        )
        return elastic_launch(config, task)(*args)

    return launch


NODES = {"mpwatch": node_of_mpwatch, "elastic": node_of_elastic}
