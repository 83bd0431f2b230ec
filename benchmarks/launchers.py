"""How each launcher is called: as its documentation shows first.

LAUNCH   Each entry imports what a script has at its top, before the clock starts. It returns a function
         `launch(task, ranks, args)` that makes the call and returns the values by rank, if the launcher returns values.
         Launchers that restart ranks take `restarts`, the number of restarts. Launchers that write the output of ranks to files
         take `logs`, a folder; they also show the output, with a prefix.
WARM     Each entry is a context with persistent ranks. It gives a function `call(task, *args)`: one call on all of them.
NODES    Each entry is like those of LAUNCH, for one of several nodes. It is called on each node.

Nothing in this module runs in a rank.
"""

import contextlib
import os
from dataclasses import dataclass

import tasks


@dataclass(frozen=True)
class NodeConfig:
    """One node of a job. All nodes are on this machine, and node 0 serves the store."""

    node: int
    port: int
    min_nodes: int
    max_nodes: int
    node_timeout: int | None  # seconds; None: the default of each launcher


def mpwatch(restarts=0, logs=None, **options):
    from mpwatch import run

    if logs:
        from mpwatch import LogSpec

        options["logs"] = LogSpec(logs, prefix="[{rank}] ")
    return lambda task, ranks, args: list(run(task, ranks, args=args, max_restarts=restarts, **options))


def floor():
    """Start processes in a loop and join them. Nothing is returned, and no failure is noticed."""
    from multiprocessing import get_context

    spawn = get_context("spawn")

    def launch(task, ranks, args):
        processes = [spawn.Process(target=tasks.call_with_rank, args=(rank, task, *args)) for rank in range(ranks)]
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
        spawn(tasks.call_with_rank, args=(task, *args), nprocs=ranks)

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
    """Submit one future for each rank to a pool of processes. Each rank is a process of its own, see `call_together`."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    spawn = get_context("spawn")

    def launch(task, ranks, args):
        barrier = spawn.Barrier(ranks)
        with ProcessPoolExecutor(ranks, mp_context=spawn, initializer=tasks.keep_barrier, initargs=(barrier,)) as pool:
            futures = [pool.submit(tasks.call_together, tasks.call_with_rank, rank, task, *args) for rank in range(ranks)]
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
    """Send a byte to each rank by a pipe, and receive it back. The function is not sent."""
    from multiprocessing import get_context

    spawn = get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(ranks)]
    processes = [spawn.Process(target=tasks.echo, args=(rank_end,)) for _, rank_end in pipes]
    for process in processes:
        process.start()

    def call(_task):
        for own_end, _ in pipes:
            own_end.send(1)
        return [own_end.recv() for own_end, _ in pipes]

    yield call
    for own_end, _ in pipes:
        own_end.send(None)
    for process in processes:
        process.join()


@contextlib.contextmanager
def warm_executor(ranks, _folder):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    spawn = get_context("spawn")
    barrier = spawn.Barrier(ranks)
    with ProcessPoolExecutor(ranks, mp_context=spawn, initializer=tasks.keep_barrier, initargs=(barrier,)) as pool:

        def call(task, *args):
            futures = [pool.submit(tasks.call_together, task, *args) for _ in range(ranks)]
            return [future.result() for future in futures]

        yield call


@contextlib.contextmanager
def warm_ray(ranks, folder):
    """Put each argument into Ray's store once for all actors, as its documentation advises."""
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


def launch_mpwatch_node(node_config):
    import mpwatch.nodes.run_controller  # noqa: F401  its first call would import it
    from mpwatch import Rendezvous, run

    settings = {} if node_config.node_timeout is None else {"node_timeout": node_config.node_timeout}
    nnodes = node_config.min_nodes, node_config.max_nodes
    rendezvous = Rendezvous(
        f"127.0.0.1:{node_config.port}",
        "job",
        nnodes,
        is_host=node_config.node == 0,
        local_addr=f"127.0.0.{1 + node_config.node}",
        **settings,
    )
    return lambda task, ranks, args: run(task, ranks, args=args, rendezvous=rendezvous, progress=False)


def launch_elastic_node(node_config):
    """Launch with the default number of restarts. torch elastic uses up one of them for each lost node."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = {"is_host": node_config.node == 0}
    if node_config.node_timeout is not None:
        # the shortest possible time; and torch elastic does not wait longer for other nodes
        settings |= {
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": node_config.node_timeout,
            "last_call_timeout": node_config.node_timeout,
        }

    def launch(task, ranks, args):
        config = LaunchConfig(
            min_nodes=node_config.min_nodes,
            max_nodes=node_config.max_nodes,
            nproc_per_node=ranks,
            run_id="job",
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{node_config.port}",
            rdzv_configs=settings,
            local_addr=f"127.0.0.{1 + node_config.node}",
            max_restarts=3 if node_config.min_nodes < node_config.max_nodes else 0,
        )
        return elastic_launch(config, task)(*args)

    return launch


NODES = {"mpwatch": launch_mpwatch_node, "elastic": launch_elastic_node}
