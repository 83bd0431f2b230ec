"""The blueprint of a run and of a rank: what all options end up in, validated once, then never changed.

Shared by the watcher and the user; a rank makes its own `Worker` when the function asks for it.
"""

import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from numbers import Real
from typing import Any, Generic, Literal, TypeVar

from .platform import gpus_may_exist, usable_cpus

__all__ = ["RANK_VARIABLES", "GroupSpec", "Nprocs", "Worker", "WorkerSpec", "check_call", "check_flag", "name_of"]

T = TypeVar("T")
MAX_PORT = 65536
Nprocs = int | Literal["auto", "cpu", "gpu"]

# What tells a rank who it is. MASTER_ADDR and MASTER_PORT are not here: a caller may know a better address.
RANK_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "NODE_RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_USE_AGENT_STORE",
    }
)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Who a rank is. In a rank `current_worker()` gives its own; the result of a run has them all."""

    rank: int
    """Global rank, from 0 to world_size - 1."""
    local_rank: int
    """Rank on this machine, from 0; usually the index of the GPU to use."""
    world_size: int
    local_world_size: int
    group_rank: int = 0
    """Number of this machine among those of the run."""
    group_world_size: int = 1
    role: str = "default"
    role_rank: int
    role_world_size: int
    restart_count: int = 0
    run_id: str
    master_addr: str
    """Address that rank 0 can serve a rendezvous store on."""
    master_port: int
    """TCP port reserved for it: nobody else is given it while the run lasts."""
    state: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """For the function's own use; lives as long as the rank."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """How many ranks, and under which limits: the options that hold for any function. See WorkerSpec."""

    nprocs: Nprocs = "auto"
    backend: str | None = None
    env: Mapping[str, str] | Callable[[Worker], Mapping[str, str]] | None = None
    timeout: float | None = None
    heartbeat_timeout: float | None = None
    grace_period: float = 10.0
    role: str = "default"

    def __post_init__(self) -> None:
        _check_backend(self.backend)
        _check_env(self.env)
        if self.timeout is not None:
            _check_seconds("timeout", self.timeout, at_least="more than 0")
        if self.heartbeat_timeout is not None:
            _check_seconds("heartbeat_timeout", self.heartbeat_timeout, at_least="more than 0")
        _check_seconds("grace_period", self.grace_period, at_least="0 or more")
        if not isinstance(self.role, str):
            raise TypeError(f"role must be a string, not {self.role!r}")
        if not self.role or not self.role.isprintable():
            raise ValueError(f"role must be a name, not {self.role!r}")
        object.__setattr__(self, "nprocs", _count(self.nprocs))

    def environment_of(self, worker: Worker) -> dict[str, str]:
        """The extra variables for this rank, checked. Raises TypeError or ValueError."""
        extra = self.env(worker) if callable(self.env) else self.env
        if callable(self.env):
            _check_mapping("what env() returned", extra)
        return dict(extra or {})


@dataclass(frozen=True, kw_only=True)
class WorkerSpec(GroupSpec, Generic[T]):
    """What to run, on how many ranks, and under which limits: the options of `mpwatch.run`, which explains them.

    Raises TypeError or ValueError naming the argument and the value.
    """

    fn: Callable[..., T]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_call(self.fn, self.args, self.kwargs)
        super().__post_init__()
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "kwargs", dict(self.kwargs or {}))

    @property
    def fn_name(self) -> str:
        """The function's name for messages; partials and callable objects have none of their own."""
        return name_of(self.fn)


def check_call(fn: object, args: object, kwargs: object) -> None:
    """Whether that can be called in a rank. Raises TypeError naming the argument and the value."""
    _check_fn(fn)
    _check_args(args)
    _check_kwargs(kwargs)


def check_flag(name: str, value: object) -> None:
    """Whether that is True or False. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def name_of(fn: object) -> str:
    """What to call a callable in a message."""
    name = getattr(fn, "__qualname__", None) or getattr(getattr(fn, "func", None), "__qualname__", None)
    return str(name or type(fn).__qualname__)


def _check_fn(fn: object) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be callable, not {fn!r}")
    call = getattr(type(fn), "__call__", None)  # noqa: B004  the method itself is wanted, to see whether it is async
    if any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in (fn, call)):
        raise TypeError(
            f"fn must be an ordinary function; {name_of(fn)!r} is async def, and calling it would only make a coroutine. "
            f"Pass a function that runs it: def train(*args): return asyncio.run({name_of(fn)}(*args))"
        )


def _check_args(args: object) -> None:
    if isinstance(args, str | bytes | bytearray) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a sequence of fn's positional arguments, such as (x,), not {args!r:.200}")


def _check_kwargs(kwargs: object) -> None:
    if kwargs is None:
        return
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a mapping of fn's keyword arguments, not {kwargs!r:.200}")
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(f"kwargs must have strings as keys, not {name!r}")


def _check_backend(backend: object) -> None:
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string or None, not {backend!r}")
    if not backend:
        raise ValueError("backend must name a backend of torch.distributed, such as 'gloo', 'nccl' or 'auto', not ''")
    if "torch" not in sys.modules and find_spec("torch") is None:
        raise ValueError(f"backend={backend!r} needs torch, which is not installed here: pip install torch")


def _check_env(env: object) -> None:
    if env is not None and not callable(env):
        _check_mapping("env", env)


def _check_mapping(what: str, env: object) -> None:
    if not isinstance(env, Mapping):
        raise TypeError(f"{what} must be a mapping of strings to strings, not {env!r:.200}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"{what} must map strings to strings, not {name!r} to {value!r:.200}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{what} has a variable that no environment can hold: {name!r}={value!r:.200}")
        try:
            os.fsencode(name + value)
        except UnicodeEncodeError:
            raise ValueError(f"{what} has a variable that cannot be encoded: {name!r}={value!r:.200}") from None
        if name == "MASTER_PORT" and not (value.isdecimal() and 0 < int(value) < MAX_PORT):
            raise ValueError(f"{what} must give MASTER_PORT as a TCP port, not {value!r}")
        if name in RANK_VARIABLES:
            raise ValueError(f"{what} may not set {name}={value!r}: it tells a rank who it is, so mpwatch sets it")


def _check_seconds(name: str, value: object, at_least: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not math.isfinite(value) or float(value) < 0 or (value == 0 and at_least == "more than 0"):
        raise ValueError(f"{name} must be a number of seconds, {at_least}, not {value!r}")


def _count(nprocs: object) -> int:
    if isinstance(nprocs, str):
        return _count_named(nprocs)
    try:
        count = operator.index(nprocs)  # type: ignore[arg-type]  # of an int, or of NumPy's
    except TypeError:
        count = None
    if count is None or isinstance(nprocs, bool):
        raise TypeError(f"nprocs must be an int, 'gpu', 'cpu' or 'auto', not {nprocs!r}")
    if count < 1:
        raise ValueError(f"nprocs must be at least 1, or 'gpu', 'cpu' or 'auto', not {nprocs!r}")
    return count


def _count_named(nprocs: str) -> int:
    if nprocs == "auto":
        return _gpus() or usable_cpus()
    if nprocs == "cpu":
        return usable_cpus()
    if nprocs == "gpu":
        return _gpus() or _no_gpus()
    raise ValueError(f"nprocs must be at least 1, or 'gpu', 'cpu' or 'auto', not {nprocs!r}")


def _gpus() -> int:
    if not gpus_may_exist() or ("torch" not in sys.modules and find_spec("torch") is None):
        return 0
    import torch  # a second; only where there may be something to count

    return int(torch.cuda.device_count())


def _no_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
    raise ValueError(f"nprocs='gpu', but torch sees no GPU here{hint}; give a number, or 'cpu'")
