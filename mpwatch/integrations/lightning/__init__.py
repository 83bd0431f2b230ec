"""Lightning's Trainer and Fabric with every rank under the watcher: `watched(DDPStrategy())` in place of `DDPStrategy()`.

    trainer.fit(model) --> the launcher of the strategy --> mpwatch.run --> in each rank: what fit() does
    weights, metrics, state <--------- rank 0's Outcome <------------------ gathered by all ranks

For Lightning 2 by each of its names: lightning.pytorch and pytorch_lightning, lightning.fabric and lightning_fabric. All
that is used of it comes from the package that the strategy comes from; nothing is imported that the program has not.

What it guarantees beside what `mpwatch.run` does: no rank runs the script, as the ranks of Lightning's own launchers do;
the launcher and the options stay in the caller; what a rank has trained comes back by memory, not by a file; the caller's
environment is left alone; a strategy whose processes others have started (mpwatch.run, torchrun, SLURM) is as if it were
not watched.
"""

import copy
import itertools
import signal
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Self, TypeVar

import mpwatch
from mpwatch.integrations.lightning.trainer_state import TrainerState

__all__ = ["watched"]

S = TypeVar("S")

OF_LIGHTNING = {"fn", "nprocs", "args", "kwargs", "backend"}  # what its Trainer and strategy say
OPTIONS = {field.name for field in fields(mpwatch.WorkerSpec)} - OF_LIGHTNING
NOT_LAUNCHED = {"DataParallelStrategy", "XLAStrategy", "XLAFSDPStrategy"}  # a single process; processes that XLA starts


def watched(strategy: S, **options: Any) -> S:
    """The same strategy, its ranks started and watched by mpwatch: `Trainer(strategy=watched(DDPStrategy()), devices=4)`.

    After `fit` the caller's Trainer has what Lightning's own spawning strategies bring back (weights, callback_metrics,
    state, best_model_path, the return value), and the other metrics, the callbacks' states and the progress besides. As
    with those, a Trainer can `fit` once, weights of layers that only `configure_model` makes have no place in the caller's
    module (of which a warning tells), and a logger that counts its versions takes a new one for each run, which the
    caller's does not know. `predict` returns what rank 0 has predicted, as under "ddp", and `Fabric.launch(fn)` what fn
    returns in rank 0. A rank that fails raises `mpwatch.RunFailedError`.

    Where the processes are there already, because the Trainer is built in a function that `mpwatch.run` calls, or under
    torchrun, nothing is changed.

    A rank that is to stop, because another has failed, gets SIGTERM, and that ends it at once, be it in the midst of a
    collective; for a SIGTERM to your program holds the same. Who wants to save something then sets a handler of his own,
    say in `on_fit_start`, and has `grace_period` for it; `trainer.received_sigterm` stays False in these ranks. Callbacks'
    `on_exception` is called in the caller, as with Lightning's spawning strategies: a checkpoint written there has the
    weights as they were before.

    Args:
        strategy: an instance of one with a process for each device, of Lightning's Trainer or Fabric: DDPStrategy,
            FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, or what derives from ParallelStrategy like these.
        options: those of `mpwatch.run` (timeout, grace_period, logs, on_event, max_restarts, ...), but for fn, nprocs,
            args, kwargs and backend, which are Lightning's to say, and check.

    Raises:
        TypeError: the strategy is none of these, or there is no such option.
        ValueError: the strategy belongs to a Trainer or Fabric already; or an option is not what it should be. Trainer
            and Fabric raise it when they are made for more than one node.
    """
    target: Any = strategy
    launching = _launching(target)
    if target.launcher is not None:
        raise ValueError(
            "the strategy belongs to a Trainer or Fabric already, which has chosen a launcher; "
            "pass it a new one: Trainer(strategy=watched(DDPStrategy()))"
        )
    _check(options)
    target._configure_launcher = _LauncherFactory(target, options, launching)
    return strategy


def _launching(strategy: Any) -> ModuleType:
    """The module of the launchers of the Lightning that this strategy comes from. Raises TypeError."""
    homes = {kind.__name__: kind.__module__ for kind in type(strategy).__mro__}
    home = homes.get("ParallelStrategy", "")
    if not home.endswith(".strategies.parallel") or NOT_LAUNCHED & homes.keys():
        raise TypeError(
            "watched() takes an instance of one of Lightning's strategies with a process for each device, such as "
            f"watched(DDPStrategy()), not {strategy!r:.200}"
        )
    return import_module(home.removesuffix("parallel") + "launchers.multiprocessing")


def _check(options: dict[str, Any]) -> None:
    """At once, and not when training begins. Raises TypeError or ValueError."""
    for name in sorted(options.keys() - OPTIONS):
        raise TypeError(f"watched() has no option {name!r}; there are {', '.join(sorted(OPTIONS))}")
    spec = mpwatch.WorkerSpec(fn=_in_rank, nprocs=1, **{**options, "logs": None})  # whose ranks are not known yet
    if spec.policy.scope == "worker":
        raise ValueError(
            "restart_policy has scope='worker', but a rank that is replaced cannot join Lightning's process group; "
            "use scope='group'"
        )


class _StrategyHook:
    """What watched() has put on a strategy: of the caller's process alone, where the strategy may be copied."""

    def __init__(self, strategy: Any, options: dict[str, Any], launching: ModuleType) -> None:
        self._strategy = strategy
        self._options = options
        self._launching = launching

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(copy.deepcopy(self._strategy, memo), self._options, self._launching)


class _LauncherFactory(_StrategyHook):
    """What Lightning calls for the strategy to choose its launcher."""

    def __call__(self) -> None:
        strategy, options, launching = self._strategy, self._options, self._launching
        if strategy.cluster_environment.creates_processes_externally:
            type(strategy)._configure_launcher(strategy)
            return
        if strategy.num_nodes > 1:
            raise ValueError(f"watched() starts ranks on one machine, but num_nodes={strategy.num_nodes}; use torchrun")
        mpwatch.WorkerSpec(fn=_in_rank, nprocs=strategy.num_processes, **options)  # logs may name ranks
        launching._MultiProcessingLauncher.register(_FabricLauncher)  # Fabric then refuses launch() without a function
        kind = _TrainerLauncher if hasattr(launching, "TrainerState") else _FabricLauncher
        strategy._launcher = kind(strategy, options, launching)

    def __reduce__(self) -> Any:
        return partial, (type(self._strategy)._configure_launcher, self._strategy)


class _Launcher(_StrategyHook):
    """A launcher as Lightning knows it, but for `launch`."""

    is_interactive_compatible = True

    def __reduce__(self) -> Any:
        return type(None), ()  # in a rank there is nothing to launch

    def _run(self, trainer: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What comes of it in rank 0."""
        __tracebackhide__ = True
        work = self._launching._GlobalStateSnapshot.capture(), trainer, function
        # the caller's own come first: where one cannot be sent, it is args[0].lock, and not found in the depths of a trainer
        return mpwatch.run(_in_rank, self._strategy.num_processes, args=(*args, work), kwargs=kwargs, **self._options)[0]


class _FabricLauncher(_Launcher):
    def launch(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What the function returns in rank 0."""
        __tracebackhide__ = True
        return self._run(None, function, args, kwargs)


class _TrainerLauncher(_Launcher):
    _has_fit = False

    def launch(self, function: Callable[..., Any], /, *args: Any, trainer: Any, **kwargs: Any) -> Any:
        """What the function returns in rank 0; the caller's trainer is then where that one's is."""
        __tracebackhide__ = True
        fits = trainer.state.fn == "fit"
        if fits and self._has_fit:
            raise NotImplementedError(
                "this Trainer has fit a model already, and cannot go on: its optimizer's state has ended with its ranks. "
                "Make a new Trainer, and let it go on from a checkpoint: fit(model, ckpt_path=...)"
            )
        # after Ctrl-C Lightning ignores SIGINT, and puts back what it has noted, which would be nothing but in the ranks
        trainer._signal_connector._original_handlers = {signal.SIGINT: signal.getsignal(signal.SIGINT)}
        outcome: TrainerState = self._run(trainer, function, args, kwargs)
        self._has_fit |= fits
        outcome.bring_to(trainer)
        return outcome.value

    def kill(self, _: int) -> None:
        """Nothing: a signal to the caller stops the ranks by itself."""


def _in_rank(*args: Any, **kwargs: Any) -> Any:
    from torch import Tensor

    *args, (globals_, trainer, function) = args  # type: ignore[assignment]
    globals_.restore()
    if trainer is not None:  # Lightning's handler would note a SIGTERM, and go on; in a collective of NCCL it never runs
        trainer._signal_connector.register_signal_handlers = _leave_signals_alone
    _unshare([*args, *kwargs.values(), trainer and trainer.lightning_module])
    value = function(*args, **kwargs)
    outcome = value if trainer is None else TrainerState.of(trainer, value)
    if mpwatch.current_worker().rank != 0:
        return None
    everywhere = import_module("lightning_utilities.core.apply_func").apply_to_collection
    return everywhere(outcome, Tensor, Tensor.cpu, allow_frozen=True)  # the memory of a GPU would end with this rank


def _leave_signals_alone() -> None:
    pass


def _unshare(values: list[Any]) -> None:
    """A model that one of Lightning's spawning strategies has trained is in shared memory, where all ranks would write."""
    from torch import nn

    module: Any
    for module in (value for value in values if isinstance(value, nn.Module)):
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if not nn.parameter.is_lazy(tensor) and tensor.device.type == "cpu" and tensor.is_shared():
                tensor.data = tensor.data.clone()
