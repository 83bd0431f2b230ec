"""`notebook_launcher` for Hugging Face accelerate, with the parameters of accelerate's own `notebook_launcher`.

The ranks are new processes and not forks, so they also work if the notebook has already used CUDA or an `Accelerator`. The
caller gets the values that the function returns, or a `RunFailedError` with its exception as the cause.

This module does not import accelerate. `mpwatch.run` sets all environment variables that accelerate needs, so new programs
can call `mpwatch.run(train, 4)` directly.
"""

from collections.abc import Callable, Mapping, Sequence
from string import Template
from typing import Any, TypeVar

import mpwatch

__all__ = ["notebook_launcher"]

T = TypeVar("T")

PREFIX_FIELDS = {"role_name": "{role}", "rank": "{rank}", "local_rank": "{local_rank}"}  # torch's field -> LogSpec's field
SEVERAL_NODES = (
    "notebook_launcher starts ranks on this machine only; for several nodes use run=mpwatch.integrations.ray.run,"
    " mpwatch.run(..., rendezvous=...), `accelerate launch`, or torchrun"
)
NO_RENDEZVOUS = "ranks on one machine need no rendezvous, and max_restarts works without one; omit it"


def notebook_launcher(  # noqa: PLR0917  calls of accelerate's own launcher must work unchanged
    function: Callable[..., T],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = None,
    master_addr: str | None = None,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,  # noqa: ARG001  has no effect, see the docstring
    log_line_prefix_template: str | None = None,
    *,
    run: Callable[..., mpwatch.RunResult[T]] | None = None,
    **options: Any,
) -> mpwatch.RunResult[T]:
    """Call `function(*args)` in `num_processes` new processes, and return a RunResult with the value from each process.

    Even with `num_processes=1` the function runs in a new process. The function must make an `Accelerator` itself.

    Args:
        function: the function to call, as for `mpwatch.run`. Its only arguments are `args`.
        args: the arguments, which are the same for every rank.
        num_processes: number of ranks, as `nprocs` of `mpwatch.run`. None means one rank for each GPU, or one rank for each
            CPU if there is no GPU.
        mixed_precision: "fp8", "fp16" or "bf16" sets the default of each `Accelerator`. With "no" the default is the value
            of the variable ACCELERATE_MIXED_PRECISION, if you have set this variable.
        use_port: the TCP port (MASTER_PORT) with which the ranks find each other. If it is None, mpwatch reserves a free
            port.
        master_addr: the address of this machine (MASTER_ADDR). None means "127.0.0.1".
        node_rank: only 0 is allowed, since there is one node.
        num_nodes: number of nodes. Without `run`, only 1 is allowed.
        rdzv_backend: only "static" is allowed.
        rdzv_endpoint: only "" is allowed.
        rdzv_conf: only None or an empty mapping is allowed.
        rdzv_id: only "none" is allowed.
        max_restarts: how many times all ranks are restarted after a failure, as for `mpwatch.run`.
        monitor_interval: has no effect, because mpwatch notices a death at once and does not poll.
        log_line_prefix_template: the prefix of each line that a rank prints. It may contain ${rank}, ${local_rank} and
            ${role_name}. It is a short form of `logs=mpwatch.LogSpec(prefix=...)`. If it is None, `logs` sets the prefix.
        run: the function that runs the ranks of several nodes. Pass `mpwatch.integrations.ray.run`, or a `functools.partial`
            of this function with more options. `notebook_launcher` calls it with `nodes=num_nodes`. None means
            `mpwatch.run`, on this machine.
        options: options of `mpwatch.run`, such as `timeout`, `logs` and `env`. The variables in `env` have priority over
            the variables that the arguments above set.

    Returns:
        The values by rank: `result[3]` is the value of rank 3. Iteration gives the values in order of rank.

    Raises:
        mpwatch.RunFailedError: a rank failed. `__cause__` is the rank's own exception.
        mpwatch.LaunchError: the ranks could not be started. No rank is left.
        TypeError, ValueError: an argument is bad, or is not supported on one machine.
    """
    __tracebackhide__ = True  # so that IPython and pytest show only frames of the user's code
    if run is None:
        _check_only("num_nodes", num_nodes, 1, SEVERAL_NODES)
    _check_only("node_rank", node_rank, 0, SEVERAL_NODES)
    _check_only("rdzv_backend", rdzv_backend, "static", NO_RENDEZVOUS)
    _check_only("rdzv_endpoint", rdzv_endpoint, "", NO_RENDEZVOUS)
    _check_only("rdzv_conf", rdzv_conf or None, None, NO_RENDEZVOUS)
    _check_only("rdzv_id", rdzv_id, "none", NO_RENDEZVOUS)
    variables = {
        "ACCELERATE_MIXED_PRECISION": mixed_precision.lower() if mixed_precision != "no" else None,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": use_port,
    }
    defaults = {name: str(value) for name, value in variables.items() if value is not None}
    options["env"] = _add_defaults(defaults, options.get("env"))
    if log_line_prefix_template is not None:
        if options.get("logs") is not None:
            raise ValueError("log_line_prefix_template and logs were both given; use logs=LogSpec(..., prefix=...)")
        options["logs"] = mpwatch.LogSpec(prefix=_convert_prefix(log_line_prefix_template))
    if max_restarts != 0:
        options["max_restarts"] = max_restarts
    if run is not None:
        options["nodes"] = num_nodes
    return (run or mpwatch.run)(function, "auto" if num_processes is None else num_processes, args=args, **options)


def _check_only(name: str, value: object, allowed: object, advice: str) -> None:
    if value != allowed:
        raise ValueError(f"{name}={value!r}: {advice}")


def _add_defaults(defaults: Mapping[str, str], env: Any) -> Any:
    """Add variables to the option `env`, whose own variables have priority."""
    if callable(env):
        return lambda worker: {**defaults, **env(worker)}
    return {**defaults, **(env or {})}


def _convert_prefix(template: str) -> str:
    """Convert a line prefix in torch's format (such as "${rank}: ") to the format of `LogSpec.prefix` ("{rank}: ")."""
    try:
        return Template(template).substitute(PREFIX_FIELDS)
    except (KeyError, ValueError) as error:
        fields = ", ".join(f"${{{name}}}" for name in PREFIX_FIELDS)
        raise ValueError(f"log_line_prefix_template may contain {fields}, not {error}") from None
