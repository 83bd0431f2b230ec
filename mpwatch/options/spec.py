"""`WorkerSpec` and `GroupSpec`: all options of a run or a WorkerGroup, validated once and then frozen.

The docstring of `mpwatch.run` explains each option. ARCHITECTURE.md says how to add an option.
"""

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, Generic, Literal, TypedDict, TypeVar

from mpwatch.events.types import Event, Progressed
from mpwatch.options.backend import Backend
from mpwatch.options.log_spec import LogSpec
from mpwatch.options.per_rank import check_per_rank
from mpwatch.options.placement import Cpus, Placement
from mpwatch.options.rendezvous import Rendezvous
from mpwatch.options.restart_policy import RestartPolicy
from mpwatch.options.stop_policy import StopPolicy
from mpwatch.options.validation import (
    check_count,
    check_env_mapping,
    check_flag,
    check_function,
    check_optional_seconds,
    check_seconds,
    check_word,
    is_async,
    name_of,
)
from mpwatch.options.worker_info import Worker
from mpwatch.os_support.hardware import count_usable_cpus, may_have_gpus

T = TypeVar("T")
C = TypeVar("C")
Nprocs = int | Literal["auto", "cpu", "gpu"]
Env = Mapping[str, str] | Callable[[Worker], Mapping[str, str]]
Observer = Callable[[Event], object]
Observers = Observer | Iterable[Observer]
ProgressObserver = Callable[[Progressed], object]
ProgressObservers = ProgressObserver | Iterable[ProgressObserver]
Debug = Literal["locals", "post_mortem"]
START_TIMEOUT = 300.0  # seconds for the start of an interpreter; a very slow file system may need more
START_TIMEOUT_VARIABLE = "MPWATCH_START_TIMEOUT"
PER_RANK_ADVICE = (
    "Every rank gets the same args; for values that differ from rank to rank pass a PerRank: args=(PerRank([a, b]),)"
)


# What type checkers know about `**options`. The docstring of `mpwatch.run` explains the options.
class RankOptions(TypedDict, total=False):
    backend: str | Backend | None
    env: Env | None
    timeout: float | None
    heartbeat_timeout: float | None
    grace_period: float
    stop: StopPolicy | Collection[int] | None
    placement: Placement | Cpus | None
    debug: Debug | None


class OutputOptions(TypedDict, total=False):
    logs: LogSpec | None
    progress: bool | None
    on_event: Observers | None
    on_progress: ProgressObservers | None


class GroupOptions(RankOptions, OutputOptions, total=False):
    """The options that `run` and WorkerGroup share."""


class NodeOptions(RankOptions, total=False):
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    max_restarts: int | RestartPolicy
    keep_going: bool


class CallOptions(NodeOptions, OutputOptions, total=False):
    rendezvous: Rendezvous | None


class RunOptions(CallOptions, total=False):
    """All options of `run`, as a TypedDict: `def launch(fn, **options: Unpack[mpwatch.RunOptions])`."""

    check: bool


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    nprocs: Nprocs
    backend: str | Backend | None = None
    env: Env | None = field(default=None, repr=False)  # secrets
    timeout: float | None = None
    heartbeat_timeout: float | None = None
    grace_period: float = 10.0
    stop: StopPolicy | Collection[int] | None = None
    placement: Placement | Cpus | None = None
    logs: LogSpec | None = None
    progress: bool | None = None
    on_event: Observers | None = None
    on_progress: ProgressObservers | None = None
    debug: Debug | None = None
    preload: Sequence[str] = field(default=(), init=False)  # only a WorkerGroup has it
    keep_going: bool = field(default=False, init=False)  # only a run has this and the next one
    rendezvous: Rendezvous | None = field(default=None, init=False)
    start_timeout: float = field(default=START_TIMEOUT, init=False, repr=False)

    def __post_init__(self) -> None:
        self._set("backend", _as_class(Backend, self.backend))
        if self.env is not None and not callable(self.env):
            check_env_mapping("env", self.env)
        check_optional_seconds("timeout", self.timeout)
        check_optional_seconds("heartbeat_timeout", self.heartbeat_timeout)
        check_seconds("grace_period", self.grace_period, at_least="0 or more")
        self._set("stop", _as_class(StopPolicy, self.stop))
        self._set("placement", _as_class(Placement, self.placement))
        if self.progress is not None and not isinstance(self.progress, bool):
            raise TypeError(
                f"progress must be True, False or None, not {self.progress!r:.200}; on_progress takes a function"
            )
        check_word("debug", self.debug, ("locals", "post_mortem"))
        self._set("on_event", _as_observers("on_event", self.on_event))
        self._set("on_progress", _as_observers("on_progress", self.on_progress))
        self._set("nprocs", _resolve_nprocs(self.nprocs))
        self._set("logs", _resolve_logs(self.logs, None if self.is_multi_node else self.nprocs))
        self._set("start_timeout", _read_start_timeout())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_scope(self, what: str) -> None:
        if self.policy.scope == "worker" and self.torch_backend.name is not None:
            raise ValueError(
                f"{what} is for ranks that do not communicate, but backend={self.torch_backend.name!r} makes a process "
                "group, in which ranks wait for each other, and which a restarted rank cannot join; leave out one of the two"
            )

    @property
    def torch_backend(self) -> Backend:
        assert isinstance(self.backend, Backend)  # see __post_init__
        return self.backend

    @property
    def stop_policy(self) -> StopPolicy:
        assert isinstance(self.stop, StopPolicy)
        return self.stop

    @property
    def cpus_and_gpus(self) -> Placement:
        assert isinstance(self.placement, Placement)
        return self.placement

    @property
    def policy(self) -> RestartPolicy:
        """A RestartPolicy that allows no restarts."""
        return RestartPolicy(0)

    @property
    def has_decisions(self) -> bool:
        """Whether a run may go on after a failure, by a restart or by `keep_going`."""
        return self.policy.max_restarts > 0 or self.keep_going

    @property
    def role(self) -> str:
        """The role of the ranks in a job of several nodes."""
        return "default" if self.rendezvous is None else self.rendezvous.role

    @property
    def fn_name(self) -> str:
        """The name of the function, for messages. It is empty for a WorkerGroup, which can call several functions."""
        return ""

    @property
    def is_multi_node(self) -> bool:
        """Whether the ranks are part of a job of several nodes."""
        return self.rendezvous is not None

    @property
    def observers(self) -> tuple[Observer, ...]:
        return _as_observers("on_event", self.on_event)

    @property
    def progress_observers(self) -> tuple[ProgressObserver, ...]:
        return _as_observers("on_progress", self.on_progress)

    def extra_env_of(self, worker: Worker) -> dict[str, str]:
        extra = self.env(worker) if callable(self.env) else self.env
        if callable(self.env):
            check_env_mapping("what env() returned", extra)
        return dict(extra or {})


@dataclass(frozen=True, kw_only=True)
class PersistentGroupSpec(GroupSpec):
    preload: Sequence[str] = ()
    scope: Literal["group", "worker"] = "group"

    def __post_init__(self) -> None:
        super().__post_init__()
        preload: object = self.preload
        if not isinstance(preload, Sequence) or isinstance(preload, str):
            raise TypeError(f"preload must be a sequence of names of modules, such as ['torch'], not {preload!r:.200}")
        self._set("preload", tuple(preload))
        if self.stop_policy.after is not None:
            raise ValueError("stop=StopPolicy(after=...) is for a run; a WorkerGroup has no time at which it begins")
        self._check_scope("scope='worker'")

    @property
    def policy(self) -> RestartPolicy:
        """No restart during a call. The next call restarts the ranks that it needs."""
        return RestartPolicy(0, scope=self.scope)


@dataclass(frozen=True, kw_only=True)
class WorkerSpec(GroupSpec, Generic[T]):
    """A whole call of `mpwatch.run`: the function, the number of ranks, and all options except `check`.

    `run(spec)` and `submit(spec)` make this call. So a library can build a call, check it, store it and pass it on, and
    `dataclasses.replace(spec, nprocs=4)` changes it. The docstring of `run` explains each option. An option that can be a
    plain value or a small class, such as `backend`, is always the class here.

    Raises TypeError or ValueError if an argument is invalid. The error text contains the name and the value of the invalid
    argument.
    """

    fn: Callable[..., T]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    max_restarts: int | RestartPolicy = 0
    keep_going: bool = False
    rendezvous: Rendezvous | None = None

    def __post_init__(self) -> None:
        check_call(self.fn, self.args, self.kwargs)
        super().__post_init__()
        self._set("args", tuple(self.args))
        self._set("kwargs", dict(self.kwargs or {}))
        if not self.is_multi_node:  # there the number of ranks is not known yet, and each rank checks it
            check_per_rank(self.args, self.kwargs or {}, int(self.nprocs))
        check_flag("keep_going", self.keep_going)
        self._set("max_restarts", as_restart_policy(self.max_restarts))
        _check_rendezvous(self.rendezvous)
        what = "keep_going=True" if self.keep_going else "RestartPolicy(scope='worker')"
        self._check_scope(what)
        if self.policy.scope == "worker" and self.rendezvous is not None:
            raise ValueError(f"{what} works on one machine only; on several nodes all ranks are restarted together")

    @property
    def policy(self) -> RestartPolicy:
        """The option `max_restarts` as a RestartPolicy. With `keep_going`, only the failed rank is restarted."""
        assert isinstance(self.max_restarts, RestartPolicy)  # see __post_init__
        return replace(self.max_restarts, scope="worker") if self.keep_going else self.max_restarts

    @property
    def fn_name(self) -> str:
        """The name of the function, for messages."""
        return name_of(self.fn)


def describe_options(spec: GroupSpec) -> str:
    """Return the options that differ from the defaults, such as `timeout=60.0`. `env` may be secret."""
    default, hidden = GroupSpec(nprocs=1), ("nprocs", "progress", "on_event", "on_progress")
    names = [each.name for each in fields(GroupSpec) if each.init and each.repr and each.name not in hidden]
    changed = [name for name in names if getattr(spec, name) != getattr(default, name)]
    return ", ".join(f"{name}={getattr(spec, name)!r:.200}" for name in changed)


def check_call(fn: object, args: object, kwargs: object, *, advice: str = PER_RANK_ADVICE) -> None:
    """Raise TypeError if `fn` cannot be called so. `advice` ends the text."""
    if not callable(fn):
        raise TypeError(f"fn must be callable, not {fn!r}")
    if is_async(fn):
        raise TypeError(
            f"fn must be an ordinary function; {name_of(fn)!r} is async def, and calling it would only make a coroutine. "
            f"Pass a function that runs it: def train(*args): return asyncio.run({name_of(fn)}(*args))"
        )
    if isinstance(args, str | bytes | bytearray) or not isinstance(args, Sequence):
        raise TypeError(f"args must be a sequence of fn's positional arguments, such as (x,), not {args!r:.200}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a mapping of fn's keyword arguments, not {kwargs!r:.200}")
    if "__signature__" in getattr(fn, "__dict__", {}):  # a decorator may have copied it from a function with other arguments
        return
    try:
        signature = inspect.signature(fn, follow_wrapped=False)  # a wrapped function may take other arguments
    except (TypeError, ValueError, SystemError):  # fn may be written in C; Python 3.11 fails in two threads at once
        return
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        text = f"fn {name_of(fn)}{signature!s:.200} cannot be called with these args and kwargs: {error}. {advice}"
        raise TypeError(text) from None


def _as_class(cls: type[C], value: object) -> C:
    """Return an option that can be a plain value or a class, such as `backend`, as the class. The class checks the value."""
    make: Callable[..., C] = cls
    return value if isinstance(value, cls) else make() if value is None else make(value)


def as_restart_policy(max_restarts: Any) -> RestartPolicy:
    return max_restarts if isinstance(max_restarts, RestartPolicy) else RestartPolicy(max_restarts)


def _read_start_timeout() -> float:
    text = os.environ.get(START_TIMEOUT_VARIABLE, str(START_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"the variable {START_TIMEOUT_VARIABLE} must be a number of seconds, not {text!r}") from None
    check_seconds(f"the variable {START_TIMEOUT_VARIABLE}", seconds, at_least="more than 0")
    return seconds


def _check_rendezvous(rendezvous: object) -> None:
    if rendezvous is None:
        return
    if not isinstance(rendezvous, Rendezvous):
        raise TypeError(
            "rendezvous must be a Rendezvous, such as Rendezvous('node0:29400', run_id='job', nnodes=2), or None, not "
            f"{rendezvous!r:.200}"
        )
    if find_spec("torch") is None:
        raise ValueError("rendezvous needs torch, which is not installed here: pip install torch")


def _as_observers(name: str, value: object) -> tuple[Callable[[Any], object], ...]:
    if value is None:
        return ()
    observers = tuple(value) if isinstance(value, Iterable) and not (callable(value) or isinstance(value, str)) else (value,)
    for observer in observers:
        check_function(name, observer, "a function that takes an Event, or several of them")
    return observers


def _resolve_logs(logs: object, world_size: object) -> LogSpec | None:
    """Return a LogSpec whose folder is an absolute path. `world_size` is None if it is not known yet."""
    if logs is None:
        return None
    if not isinstance(logs, LogSpec):
        raise TypeError(f"logs must be a LogSpec, such as LogSpec({str(logs)!r:.200}), or None, not {logs!r:.200}")
    if isinstance(world_size, int):
        logs.check_ranks(world_size)
    return logs.with_absolute_dir()


def _resolve_nprocs(nprocs: object) -> int:
    match nprocs:
        case "auto":
            return _count_gpus() or count_usable_cpus()
        case "cpu":
            return count_usable_cpus()
        case "gpu" if count := _count_gpus():
            return count
        case "gpu":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            hint = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
            raise ValueError(f"nprocs='gpu', but torch sees no GPU here{hint}; give a number, or 'cpu'")
        case str():
            raise ValueError(f"nprocs must be a number of ranks, 'gpu', 'cpu' or 'auto', not {nprocs!r}")
        case _:
            return check_count("nprocs", nprocs, at_least=1)


def _count_gpus() -> int:
    if not may_have_gpus() or ("torch" not in sys.modules and find_spec("torch") is None):
        return 0
    import torch  # this takes a second, so it is imported only where there may be a GPU

    return int(torch.cuda.device_count())
