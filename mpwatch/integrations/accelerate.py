"""Hugging Face accelerate: `notebook_launcher`, with the parameters of accelerate's own, run by mpwatch.

    from mpwatch.integrations.accelerate import notebook_launcher

    result = notebook_launcher(train, (config,), num_processes=4, mixed_precision="bf16")
    result[0]  # what train returned in rank 0

Only the import of a notebook changes. What it gains: the ranks are new processes and not forks, so that it does no harm if
CUDA, or an `Accelerator`, was used in the notebook before; what the function returns comes back; what it raises is raised.

accelerate is not imported here: the function does that. It needs nothing else than what `mpwatch.run` sets, either, so
`mpwatch.run(train, 4)` will do for all who do not come from accelerate's launcher.
"""

from collections.abc import Callable, Mapping, Sequence
from string import Template
from typing import Any, TypeVar

import mpwatch

__all__ = ["notebook_launcher"]

T = TypeVar("T")

MAX_PORT = 65535
PRECISIONS = ("no", "fp8", "fp16", "bf16")
FIELDS = {"role_name": "{role}", "rank": "{rank}", "local_rank": "{local_rank}"}  # of torch's templates, as LogSpec has them
SEVERAL_NODES = "mpwatch starts ranks on this machine alone as yet; for several nodes use `accelerate launch`, or torchrun"
NO_RENDEZVOUS = "ranks on one machine need no rendezvous, and max_restarts works without one; leave it out"


def notebook_launcher(  # noqa: PLR0917  a call of accelerate's own is left as it is
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
    monitor_interval: float = 0.1,  # noqa: ARG001  as the docstring says
    log_line_prefix_template: str | None = None,
    **options: Any,
) -> mpwatch.RunResult[T]:
    """Call `function(*args)` in `num_processes` new processes, and return what they returned, by rank.

    The function is always called in a process of its own, also if `num_processes` is 1. It makes its `Accelerator` itself.

    Args:
        function: what to call: see `mpwatch.run`. It gets `args` and nothing else.
        args: its arguments, the same for every rank.
        num_processes: number of ranks, `nprocs` of `mpwatch.run`. None: one a GPU, or one a CPU where there are no GPUs.
        mixed_precision: "fp8", "fp16" or "bf16": for each `Accelerator` that does not say otherwise. "no": as
            ACCELERATE_MIXED_PRECISION says, so none unless you have set that.
        use_port: the TCP port (MASTER_PORT) over which the ranks find each other. None: a free one, which is kept for them.
        master_addr: the address of this machine (MASTER_ADDR). None: "127.0.0.1".
        node_rank: only 0, since there is one node.
        num_nodes: only 1.
        rdzv_backend: only "static".
        rdzv_endpoint: only "".
        rdzv_conf: only None, or empty.
        rdzv_id: only "none".
        max_restarts: how often all ranks are started again after a failure; see `mpwatch.run`.
        monitor_interval: has no effect: a death is noticed when it happens, nothing is looked at in intervals.
        log_line_prefix_template: what each line that a rank prints begins with, with any of ${rank}, ${local_rank} and
            ${role_name}: short for `logs=mpwatch.LogSpec(prefix=...)`. None: as `logs` says.
        options: those of `mpwatch.run`: `timeout`, `logs`, `env`, ... In `env`, what is said above can be said otherwise.

    Returns:
        The values by rank: `result[3]` is rank 3's, iterating gives them in order.

    Raises:
        mpwatch.RunFailedError: a rank failed; raised from that rank's own exception.
        mpwatch.LaunchError: the ranks could not be started; none is left.
        TypeError, ValueError: an argument is not what it should be, or cannot be had on one machine.
    """
    __tracebackhide__ = True  # of IPython and pytest: what they show of an error is the user's own code
    _check_only("num_nodes", num_nodes, 1, SEVERAL_NODES)
    _check_only("node_rank", node_rank, 0, SEVERAL_NODES)
    _check_only("rdzv_backend", rdzv_backend, "static", NO_RENDEZVOUS)
    _check_only("rdzv_endpoint", rdzv_endpoint, "", NO_RENDEZVOUS)
    _check_only("rdzv_conf", rdzv_conf or None, None, NO_RENDEZVOUS)
    _check_only("rdzv_id", rdzv_id, "none", NO_RENDEZVOUS)
    variables = {
        "ACCELERATE_MIXED_PRECISION": _precision(mixed_precision),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": _port(use_port),
    }
    options["env"] = _added_to({name: value for name, value in variables.items() if value is not None}, options.get("env"))
    if log_line_prefix_template is not None:
        if options.get("logs") is not None:
            raise ValueError("log_line_prefix_template and logs both say what is printed; use logs=LogSpec(..., prefix=...)")
        options["logs"] = mpwatch.LogSpec(prefix=_prefix(log_line_prefix_template))
    if max_restarts != 0:
        options["max_restarts"] = max_restarts
    return mpwatch.run(function, "auto" if num_processes is None else num_processes, args=args, **options)


def _check_only(name: str, value: object, only: object, instead: str) -> None:
    if value != only:
        raise ValueError(f"{name}={value!r}: {instead}")


def _precision(mixed_precision: object) -> str | None:
    """What accelerate is told; None: nothing."""
    if not isinstance(mixed_precision, str) or mixed_precision.lower() not in PRECISIONS:
        raise ValueError(f"mixed_precision must be one of {', '.join(map(repr, PRECISIONS))}, not {mixed_precision!r}")
    return None if mixed_precision.lower() == "no" else mixed_precision.lower()


def _port(use_port: object) -> str | None:
    """As an environment has it; None: whatever is reserved."""
    if use_port is None:
        return None
    if not (str(use_port).isdecimal() and 0 < int(str(use_port)) <= MAX_PORT):
        raise ValueError(f"use_port must be a TCP port, or None for one that is free, not {use_port!r}")
    return str(use_port)


def _added_to(variables: Mapping[str, str], env: Any) -> Any:
    """The option `env` with these, among which the caller's prevail."""
    if callable(env):
        return lambda worker: _joined(variables, env(worker))
    return _joined(variables, {} if env is None else env)


def _joined(variables: Mapping[str, str], more: Any) -> Any:
    """What is no mapping mpwatch.run will complain of."""
    return {**variables, **more} if isinstance(more, Mapping) else more


def _prefix(template: object) -> str:
    """As LogSpec has it."""
    if not isinstance(template, str):
        raise TypeError(f"log_line_prefix_template must be a string or None, not {template!r}")
    try:
        return Template(template).substitute(FIELDS)
    except (KeyError, ValueError) as error:
        fields = ", ".join(f"${{{name}}}" for name in FIELDS)
        raise ValueError(
            f"log_line_prefix_template may have {fields}, but {template!r} cannot be filled in: {error}"
        ) from None
