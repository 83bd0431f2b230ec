"""`WorkerSpec` and `GroupSpec`: all options of a run or a WorkerGroup, validated once and then frozen.

ARCHITECTURE.md says how to add an option.
"""

import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Generic, Literal, TypeVar

from mpwatch.events.types import Event
from mpwatch.options.call_signature import PER_RANK_ADVICE, check_signature
from mpwatch.options.log_spec import LogSpec
from mpwatch.options.per_rank import check_per_rank
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.options.validation import (
    RESERVED_SIGNALS,
    as_int,
    check_count,
    check_env_mapping,
    check_flag,
    check_seconds,
    check_signals,
    is_async,
)
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.cpu_affinity import can_set_affinity, format_cpus, get_allowed_cpus
from mpwatch.os_support.hardware import count_usable_cpus, may_have_gpus
from mpwatch.os_support.signals import name_signal

T = TypeVar("T")
Nprocs = int | Literal["auto", "cpu", "gpu"]
Observer = Callable[[Event], object]
Observers = Observer | Iterable[Observer]
Bind = Literal["cores", "numa"] | Callable[[Worker], Iterable[int]]
VisibleDevices = Literal["own"]
NOT_FORWARDED: Mapping[int, str] = {
    **RESERVED_SIGNALS,
    **dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), "it stops the ranks"),
}


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The options that do not depend on the function, such as the number of ranks, the limits and the observers."""

    nprocs: Nprocs = "auto"
    backend: str | None = None
    env: Mapping[str, str] | Callable[[Worker], Mapping[str, str]] | None = field(default=None, repr=False)  # secrets
    timeout: float | None = None
    heartbeat_timeout: float | None = None
    grace_period: float = 10.0
    start_timeout: float = 300.0
    role: str = "default"
    logs: LogSpec | None = None
    on_event: Observers | None = None
    progress: bool | None = None
    capture_locals: bool = False
    post_mortem: bool = False
    stall_after: float | None = 60.0
    backend_timeout: float | None = None
    stop_signals: Collection[int] = ()
    stop_timeout: float | None = None
    preload: Sequence[str] = ()
    bind: Bind | None = None
    visible_devices: VisibleDevices | None = None
    forward_signals: Collection[int] = ()

    def __post_init__(self) -> None:
        check_flag("capture_locals", self.capture_locals)
        check_flag("post_mortem", self.post_mortem)
        _check_backend(self.backend)
        _check_env(self.env)
        if self.timeout is not None:
            check_seconds("timeout", self.timeout, at_least="more than 0")
        if self.heartbeat_timeout is not None:
            check_seconds("heartbeat_timeout", self.heartbeat_timeout, at_least="more than 0")
        if self.stall_after is not None:
            check_seconds("stall_after", self.stall_after, at_least="more than 0")
        if self.backend_timeout is not None:
            check_seconds("backend_timeout", self.backend_timeout, at_least="more than 0")
            _check_has_backend(self.backend, self.backend_timeout)
        check_seconds("grace_period", self.grace_period, at_least="0 or more")
        check_seconds("start_timeout", self.start_timeout, at_least="more than 0")
        if not isinstance(self.role, str):
            raise TypeError(f"role must be a string, not {self.role!r}")
        if not self.role or not self.role.isprintable():
            raise ValueError(f"role must be a name, not {self.role!r}")
        if self.progress is not None and not isinstance(self.progress, bool):
            raise TypeError(f"progress must be True, False or None, not {self.progress!r:.200}")
        if self.stop_timeout is not None:
            check_seconds("stop_timeout", self.stop_timeout, at_least="more than 0")
        object.__setattr__(self, "stop_signals", check_signals("stop_signals", self.stop_signals))
        _check_bind(self.bind)
        _check_visible_devices(self.visible_devices)
        object.__setattr__(self, "forward_signals", check_signals("forward_signals", self.forward_signals, NOT_FORWARDED))
        _check_not_in_both(self.stop_signals, self.forward_signals)
        object.__setattr__(self, "preload", _check_preload(self.preload))
        object.__setattr__(self, "on_event", _as_observers(self.on_event))
        object.__setattr__(self, "nprocs", _resolve_nprocs(self.nprocs))
        object.__setattr__(self, "logs", _resolve_logs(self.logs, None if self.is_multi_node else self.nprocs))

    @property
    def policy(self) -> RestartPolicy:
        """A RestartPolicy that allows no restarts."""
        return RestartPolicy(0)

    @property
    def fn_name(self) -> str:
        """The name of the function, for messages, or an empty text for a WorkerGroup."""
        return ""

    @property
    def is_multi_node(self) -> bool:
        """Whether the ranks are part of a job of several nodes."""
        return False

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The functions that mpwatch calls with each event."""
        return _as_observers(self.on_event)

    def extra_env_of(self, worker: Worker) -> dict[str, str]:
        """Return the extra environment variables of this rank. Raises TypeError or ValueError for invalid variables."""
        extra = self.env(worker) if callable(self.env) else self.env
        if callable(self.env):
            check_env_mapping("what env() returned", extra)
        return dict(extra or {})


@dataclass(frozen=True, kw_only=True)
class PersistentGroupSpec(GroupSpec):
    """All options of a WorkerGroup. The docstring of WorkerGroup explains each option."""

    scope: Literal["group", "worker"] = "group"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy.scope == "worker" and self.backend is not None:
            raise ValueError(
                f"scope='worker' is for ranks that do not communicate, but backend={self.backend!r} makes a process group, "
                "which a restarted rank cannot join; leave out one of the two"
            )

    @property
    def policy(self) -> RestartPolicy:
        """A RestartPolicy that allows no restarts during a call of a WorkerGroup.

        When the next call needs a rank that has ended, mpwatch first restarts this rank.
        """
        return RestartPolicy(0, scope=self.scope)


@dataclass(frozen=True, kw_only=True)
class WorkerSpec(GroupSpec, Generic[T]):
    """All options of `mpwatch.run`. The docstring of `run` explains each option.

    Raises TypeError or ValueError if an argument is invalid. The error text contains the name and the value of the invalid
    argument.
    """

    fn: Callable[..., T]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    max_restarts: int | None = None
    restart_policy: RestartPolicy | None = None
    keep_going: bool = False
    rendezvous: Rendezvous | None = None
    stop_after: float | None = None

    def __post_init__(self) -> None:
        check_call(self.fn, self.args, self.kwargs)
        super().__post_init__()
        if self.stop_after is not None:
            check_seconds("stop_after", self.stop_after, at_least="more than 0")
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "kwargs", dict(self.kwargs or {}))
        check_per_rank(self.args, self.kwargs or {}, int(self.nprocs), is_multi_node=self.is_multi_node)
        policy = _resolve_policy(self.max_restarts, self.restart_policy, self.backend, keep_going=self.keep_going)
        _check_rendezvous(self.rendezvous, policy)
        object.__setattr__(self, "restart_policy", policy)
        object.__setattr__(self, "max_restarts", policy.max_restarts)
        object.__setattr__(self, "keep_going", policy.keep_going)

    @property
    def policy(self) -> RestartPolicy:
        """The restart policy."""
        assert self.restart_policy is not None  # __post_init__ sets it
        return self.restart_policy

    @property
    def is_multi_node(self) -> bool:
        """Whether the ranks are part of a job of several nodes."""
        return self.rendezvous is not None

    @property
    def fn_name(self) -> str:
        """The name of the function, for messages."""
        return name_of(self.fn)


def check_call(fn: object, args: object, kwargs: object, *, advice: str = PER_RANK_ADVICE) -> None:
    """Check a function and its arguments. Raises TypeError.

    If `fn` cannot be called with `args` and `kwargs`, the error text ends with `advice`, which says what the user can do.
    """
    _check_fn(fn)
    checked_args, checked_kwargs = _check_args(args), _check_kwargs(kwargs)
    check_signature(fn, name_of(fn), checked_args, checked_kwargs, advice)


def _resolve_policy(max_restarts: object, policy: object, backend: str | None, *, keep_going: object) -> RestartPolicy:
    """Return the RestartPolicy of a run, which combines the options `max_restarts`, `restart_policy` and `keep_going`."""
    check_flag("keep_going", keep_going)
    if policy is None:
        number = 0 if max_restarts is None else check_count("max_restarts", max_restarts, at_least=0)
        policy = RestartPolicy(number, scope="worker", keep_going=True) if keep_going else RestartPolicy(number)
        max_restarts = None
    if not isinstance(policy, RestartPolicy):
        raise TypeError(f"restart_policy must be a RestartPolicy, not {policy!r}")
    if max_restarts not in (None, policy.max_restarts):
        raise ValueError(
            f"max_restarts={max_restarts!r} and restart_policy={policy!r} both set the number of restarts; set it "
            f"in the policy only: RestartPolicy({max_restarts!r}, ...)"
        )
    if policy.scope == "worker" and backend is not None and (keep_going or policy.keep_going):
        raise ValueError(
            f"keep_going=True is for ranks that do not communicate, but backend={backend!r} makes a process group, in which "
            "ranks wait for each other; leave out one of the two"
        )
    if policy.scope == "worker" and backend is not None:
        raise ValueError(
            f"restart_policy has scope='worker', but backend={backend!r} makes a process group, which a restarted"
            " rank cannot join; use scope='group'"
        )
    return replace(policy, keep_going=True) if keep_going and not policy.keep_going else policy


def _check_rendezvous(rendezvous: object, policy: RestartPolicy) -> None:
    if rendezvous is None:
        return
    if not isinstance(rendezvous, Rendezvous):
        raise TypeError(
            "rendezvous must be a Rendezvous, such as Rendezvous('node0:29400', run_id='job', nnodes=2), or None, not "
            f"{rendezvous!r:.200}"
        )
    if find_spec("torch") is None:
        raise ValueError("rendezvous needs torch, which is not installed here: pip install torch")
    if policy.scope == "worker":
        raise ValueError(
            "restart_policy has scope='worker', or keep_going=True is set: both work on one machine only; on several nodes"
            " all ranks are restarted together: use scope='group'"
        )


def _as_observers(on_event: object) -> tuple[Observer, ...]:
    if on_event is None:
        return ()
    observers = (on_event,) if callable(on_event) else tuple(on_event) if isinstance(on_event, Iterable) else None
    if observers is None or not all(callable(observer) and not isinstance(observer, type) for observer in observers):
        raise TypeError(f"on_event must be a function that takes an Event, or several of them, not {on_event!r:.200}")
    for observer in filter(is_async, observers):
        raise TypeError(
            f"on_event must be an ordinary function; {name_of(observer)!r} is async def, and mpwatch would not await it"
        )
    return observers


def name_of(fn: object) -> str:
    """Return the name of a callable for messages."""
    name = getattr(fn, "__qualname__", None) or getattr(getattr(fn, "func", None), "__qualname__", None)
    return str(name or type(fn).__qualname__)


def _check_fn(fn: object) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be callable, not {fn!r}")
    if is_async(fn):
        raise TypeError(
            f"fn must be an ordinary function; {name_of(fn)!r} is async def, and calling it would only make a coroutine. "
            f"Pass a function that runs it: def train(*args): return asyncio.run({name_of(fn)}(*args))"
        )


def _check_args(args: object) -> Sequence[Any]:
    if isinstance(args, str | bytes | bytearray) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a sequence of fn's positional arguments, such as (x,), not {args!r:.200}")
    return args


def _check_kwargs(kwargs: object) -> Mapping[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a mapping of fn's keyword arguments, not {kwargs!r:.200}")
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(f"kwargs must have strings as keys, not {name!r}")
    return kwargs


def _check_backend(backend: object) -> None:
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string or None, not {backend!r}")
    if not backend:
        raise ValueError("backend must name a backend of torch.distributed, such as 'gloo', 'nccl' or 'auto', not ''")
    if "torch" not in sys.modules and find_spec("torch") is None:
        raise ValueError(f"backend={backend!r} needs torch, which is not installed here: pip install torch")


def _check_has_backend(backend: str | None, timeout: float) -> None:
    if backend is None:
        raise ValueError(
            f"backend_timeout={timeout:g} is the limit of the process group that `backend` makes, and backend is None; pass "
            "a backend, or pass timeout= to your own init_process_group"
        )


def _check_not_in_both(stop_signals: Collection[int], forward_signals: Collection[int]) -> None:
    for number in set(stop_signals) & set(forward_signals):
        raise ValueError(f"stop_signals and forward_signals both have {name_signal(number)}; leave it out of one of the two")


def _check_preload(preload: object) -> tuple[str, ...]:
    if (
        isinstance(preload, Sequence)
        and not isinstance(preload, str)
        and all(isinstance(name, str) and name for name in preload)
    ):
        return tuple(preload)
    raise TypeError(f"preload must be a sequence of names of modules, such as ['torch'], not {preload!r:.200}")


def _check_bind(bind: object) -> None:
    if bind is None:
        return
    expected = "'cores', 'numa', a function from Worker to the numbers of CPUs, or None"
    if isinstance(bind, str):
        if bind not in ("cores", "numa"):
            raise ValueError(f"bind must be {expected}, not {bind!r:.200}")
    elif not callable(bind) or isinstance(bind, type):
        raise TypeError(f"bind must be {expected}, not {bind!r:.200}")
    elif is_async(bind):
        raise TypeError(f"bind must be an ordinary function; {name_of(bind)!r} is async def, and mpwatch would not await it")
    if not can_set_affinity():
        raise ValueError(
            f"bind={bind!r:.200} needs os.sched_setaffinity, which this system does not have; leave bind out. "
            f"This machine has {format_cpus(get_allowed_cpus())}"
        )


def _check_visible_devices(visible_devices: object) -> None:
    if visible_devices is None or visible_devices == "own":
        return
    error = ValueError if isinstance(visible_devices, str) else TypeError
    raise error(f"visible_devices must be 'own' or None, not {visible_devices!r:.200}")


def _check_env(env: object) -> None:
    if env is not None and not callable(env):
        check_env_mapping("env", env)


def _resolve_logs(logs: object, world_size: object) -> LogSpec | None:
    """Check `logs`, and return a LogSpec whose folder is an absolute path.

    `world_size` is None if the number of ranks is not known yet.
    """
    if logs is None:
        return None
    if not isinstance(logs, LogSpec):
        raise TypeError(f"logs must be a LogSpec, such as LogSpec({str(logs)!r:.200}), or None, not {logs!r:.200}")
    if isinstance(world_size, int):
        logs.check_ranks(world_size)
    return logs.with_absolute_dir()


def _resolve_nprocs(nprocs: object) -> int:
    if isinstance(nprocs, str):
        return _resolve_named_nprocs(nprocs)
    count = as_int(nprocs)
    if count is None:
        raise TypeError(f"nprocs must be an int, 'gpu', 'cpu' or 'auto', not {nprocs!r}")
    if count < 1:
        raise ValueError(f"nprocs must be at least 1, or 'gpu', 'cpu' or 'auto', not {nprocs!r}")
    return count


def _resolve_named_nprocs(nprocs: str) -> int:
    if nprocs == "auto":
        return _count_gpus() or count_usable_cpus()
    if nprocs == "cpu":
        return count_usable_cpus()
    if nprocs == "gpu":
        return _count_gpus() or _raise_no_gpus()
    raise ValueError(f"nprocs must be at least 1, or 'gpu', 'cpu' or 'auto', not {nprocs!r}")


def _count_gpus() -> int:
    if not may_have_gpus() or ("torch" not in sys.modules and find_spec("torch") is None):
        return 0
    import torch  # this takes a second, so it is imported only where there may be a GPU

    return int(torch.cuda.device_count())


def _raise_no_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
    raise ValueError(f"nprocs='gpu', but torch sees no GPU here{hint}; give a number, or 'cpu'")
