"""Runs the ranks of Lightning's Trainer and Fabric under the watcher: `watched(DDPStrategy())` replaces `DDPStrategy()`.

    trainer.fit(model) --> the launcher of the strategy --> mpwatch.run --> in each rank: the function of fit()
    weights, metrics, state <------ rank 0's _TrainerState <--------------- collected by all ranks

The module supports Lightning 2 under each of its package names: lightning.pytorch and pytorch_lightning, lightning.fabric
and lightning_fabric. It imports Lightning only from the package to which the given strategy belongs.
"""

import itertools
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Self, TypeVar

import mpwatch

__all__ = ["watched"]

S = TypeVar("S")
RunOnNodes = Callable[..., "mpwatch.RunResult[Any]"]

LIGHTNING_OPTIONS = {"fn", "nprocs", "args", "kwargs", "backend"}  # Lightning's Trainer and strategy set these
# With `rendezvous`, only one of several nodes would have the state of rank 0. Lightning sets the device of each rank by the
# rank's number, so each rank has to see all devices.
UNSUPPORTED_OPTIONS = {"rendezvous"}
OPTIONS = {field.name for field in fields(mpwatch.WorkerSpec) if field.init} - LIGHTNING_OPTIONS - UNSUPPORTED_OPTIONS
# DataParallelStrategy has a single process. XLA starts the processes of the other strategies.
UNSUPPORTED_STRATEGIES = {"DataParallelStrategy", "XLAStrategy", "XLAFSDPStrategy"}
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
# Attributes of strategies that shard weights, with the values that make them return whole weights.
WHOLE_WEIGHTS_OPTIONS = {"_state_dict_type": "full", "_save_distributed_checkpoint": False}
CHECKPOINT_PATHS = ("dirpath", "best_model_path")  # attributes of a checkpoint callback, which are set in the rank


def watched(strategy: S, *, run: RunOnNodes | None = None, **options: Any) -> S:
    """Change a Lightning strategy so that mpwatch starts and watches its ranks. Return the same strategy object.

    Example: `Trainer(strategy=watched(DDPStrategy()), devices=4)`.

    After `fit`, the caller has the same data as with Lightning's own spawning strategies: weights, callback_metrics, state,
    best_model_path and the return value. With `watched`, the caller's Trainer also has logged_metrics, progress_bar_metrics,
    the states of callbacks and the progress of the training. `predict` returns the predictions of rank 0, as with
    Lightning's strategy "ddp". `Fabric.launch(fn)` returns the value that `fn` returned in rank 0. If a rank fails,
    `Fabric.launch` raises `mpwatch.RunFailedError`.

    Lightning calls the `setup` of a callback only in the ranks. If `load_state_dict` of a callback needs an attribute that
    `setup` creates, `load_state_dict` raises an exception in the caller. If `state_dict` or `load_state_dict` of a callback
    or of the caller's module raises an exception, mpwatch issues a warning that names it, and copies all other state.

    Lightning's own spawning strategies have the same limits:

    - You can call `fit` of a Trainer only once.
    - A layer that is created only in `configure_model` does not exist in the caller's LightningModule. If the caller's
      module lacks a layer, the weights of this layer do not come back to the caller, and a warning names these weights.
    - Some loggers, such as TensorBoardLogger, give each run a new version number. The caller's logger does not know the
      version number of the run.
    - If a rank fails, Lightning passes the RunFailedError to `on_exception` of the caller's callbacks. If `on_exception` of
      a callback writes a checkpoint, this checkpoint has the weights from before the run.

    If a rank of a Trainer raises an exception, mpwatch calls the strategy's `on_exception` in the rank with this exception.

    `watched` changes nothing if another launcher, such as torchrun or `mpwatch.run`, has already started the processes.

    mpwatch stops a rank with SIGTERM if another rank has failed or your program has received SIGTERM. SIGTERM ends a rank at
    once, even in a collective. To save something before SIGTERM ends a rank, set a SIGTERM handler in the rank, for example
    in `on_fit_start`. If the rank has not exited `grace_period` seconds after SIGTERM, mpwatch kills the rank. In the ranks,
    `trainer.received_sigterm` stays False even after a SIGTERM.

    Args:
        strategy: a strategy of Lightning's Trainer or Fabric that has one process for each device: an instance of
            DDPStrategy, FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, or another subclass of ParallelStrategy.
        run: the function that runs the ranks of several nodes: `mpwatch.integrations.ray.run`, or a `functools.partial` of
            `mpwatch.integrations.ray.run` with more options. mpwatch passes the Trainer's num_nodes as the option `nodes`.
            None means `mpwatch.run`, on this machine.
        options: options of `mpwatch.run`, such as timeout, grace_period, logs, on_event and max_restarts. Lightning sets fn,
            nprocs, args, kwargs and backend. `check`, `rendezvous` and `Placement(gpus=...)` are not supported.

    Raises:
        TypeError: the strategy has another class, or an option does not exist.
        ValueError: the strategy belongs to a Trainer or Fabric already. Trainer and Fabric raise TypeError or ValueError if
            an option has a bad value, or if they are made for more than one node and `run` is None.
    """
    target: Any = strategy
    launchers = _import_launchers(target)
    if target.launcher is not None:
        raise ValueError(
            "the strategy belongs to a Trainer or Fabric already, which has chosen a launcher; "
            "pass it a new one: Trainer(strategy=watched(DDPStrategy()))"
        )
    for name in sorted(options.keys() - OPTIONS):
        raise TypeError(f"watched() has no option {name!r}; its options are {', '.join(sorted(OPTIONS))}")
    target._configure_launcher = _LauncherFactory(target, options, launchers, run)
    return strategy


def _import_launchers(strategy: Any) -> ModuleType:
    """Return Lightning's module of launchers for the strategy. Raises TypeError if `watched` does not support it."""
    modules = {cls.__name__: cls.__module__ for cls in type(strategy).__mro__}
    module = modules.get("ParallelStrategy", "")
    if not module.endswith(".strategies.parallel") or UNSUPPORTED_STRATEGIES & modules.keys():
        raise TypeError(
            "watched() takes an instance of one of Lightning's strategies with a process for each device, such as "
            f"watched(DDPStrategy()), not {strategy!r:.200}"
        )
    return import_module(module.removesuffix("parallel") + "launchers.multiprocessing")


class _LauncherFactory:
    """Replaces the method `_configure_launcher` of a strategy, which chooses the strategy's launcher. A rank gets the
    strategy's own method.
    """

    def __init__(self, strategy: Any, options: dict[str, Any], launchers: ModuleType, run: RunOnNodes | None) -> None:
        self._strategy, self._options, self._launchers, self._run_on_nodes = strategy, options, launchers, run

    def __call__(self) -> None:
        strategy, options, launchers = self._strategy, self._options, self._launchers
        if strategy.cluster_environment.creates_processes_externally:
            type(strategy)._configure_launcher(strategy)
            return
        run = mpwatch.run
        if self._run_on_nodes is not None:
            run = partial(self._run_on_nodes, nodes=strategy.num_nodes)
        elif strategy.num_nodes > 1:
            raise ValueError(
                f"watched() starts ranks on one machine, but num_nodes={strategy.num_nodes}; use what starts nodes, as in "
                "watched(DDPStrategy(), run=mpwatch.integrations.ray.run), or use torchrun"
            )
        if mpwatch.WorkerSpec(fn=_run_in_rank, nprocs=strategy.num_processes, **options).policy.scope == "worker":
            raise ValueError("a rank that is restarted alone cannot join Lightning's process group; use scope='group'")
        # Fabric refuses launch() without a function if its launcher is of this class.
        launchers._MultiProcessingLauncher.register(_Launcher)
        launcher_class = _TrainerLauncher if hasattr(launchers, "TrainerState") else _Launcher
        capture_state = launchers._GlobalStateSnapshot.capture
        strategy._launcher = launcher_class(partial(run, nprocs=strategy.num_processes, **options), capture_state)

    def __reduce__(self) -> Any:
        return partial, (type(self._strategy)._configure_launcher, self._strategy)


class _Launcher:
    """The launcher of Fabric. In a rank there is None, so Lightning calls its functions there itself."""

    is_interactive_compatible = True

    def __init__(self, run: Callable[..., Any], capture_state: Callable[[], Any]) -> None:
        self._run_function, self._capture_state = run, capture_state

    def __reduce__(self) -> Any:
        return type(None), ()

    def _run(self, trainer: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        job = self._capture_state(), trainer, function
        # The caller's arguments come first. If one of them cannot be sent, the error then names a short path such as
        # args[0].lock, and not a long path inside a trainer.
        return self._run_function(_run_in_rank, args=(*args, job), kwargs=kwargs)[0]

    def launch(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._run(None, function, args, kwargs)


class _TrainerLauncher(_Launcher):
    _has_fit = False

    def launch(self, function: Callable[..., Any], /, *args: Any, trainer: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        is_fit = trainer.state.fn == "fit"
        if is_fit and self._has_fit:
            raise NotImplementedError(
                "this Trainer has fit a model already, and cannot continue: the state of its optimizer was lost when its "
                "ranks ended. Make a new Trainer, and resume from a checkpoint: fit(model, ckpt_path=...)"
            )
        # After Ctrl-C Lightning ignores SIGINT, and then restores the handlers that it has recorded. Lightning records them
        # only in the ranks, so this code records the caller's handler.
        trainer._signal_connector._original_handlers = {signal.SIGINT: signal.getsignal(signal.SIGINT)}
        state: _TrainerState = self._run(trainer, function, args, kwargs)
        self._has_fit |= is_fit
        state.restore(trainer)
        return state.value

    def kill(self, _: int) -> None:
        """Do nothing, because `mpwatch.run` stops the ranks if the caller receives Ctrl-C or SIGTERM."""


def _run_in_rank(*args: Any, **kwargs: Any) -> Any:
    from torch import Tensor

    *args, (global_state, trainer, function) = args  # type: ignore[assignment]
    global_state.restore()
    if trainer is not None:
        # Lightning's SIGTERM handler only sets a flag, and training continues. In an NCCL collective the handler never runs.
        trainer._signal_connector.register_signal_handlers = _keep_signal_handlers
    _unshare_weights([*args, *kwargs.values(), trainer and trainer.lightning_module])
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        if trainer is not None:
            trainer.strategy.on_exception(error)  # DDPStrategy replaces torch's text about unused parameters
        raise
    answer = value if trainer is None else _TrainerState.collect(trainer, value)
    if mpwatch.current_worker().rank != 0:
        return None
    apply_to_collection = import_module("lightning_utilities.core.apply_func").apply_to_collection
    return apply_to_collection(answer, Tensor, Tensor.cpu, allow_frozen=True)  # GPU memory of this rank is freed at its end


def _keep_signal_handlers() -> None:
    pass


def _unshare_weights(values: list[Any]) -> None:
    """Give each rank weights of its own. A spawning strategy of Lightning may have moved them to shared memory before."""
    from torch import nn

    module: Any
    for module in (value for value in values if isinstance(value, nn.Module)):
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if not nn.parameter.is_lazy(tensor) and tensor.device.type == "cpu" and tensor.is_shared():
                tensor.data = tensor.data.clone()


@dataclass
class _TrainerState:
    """The state of the trainer in rank 0, and the value that the function returned in rank 0."""

    value: Any
    state: Any
    should_stop: bool
    metrics: dict[str, Any]
    checkpoint_paths: dict[str, Any]
    callback_states: dict[str, dict[str, Any]]
    progress: dict[str, Any]
    weights: dict[str, Any]

    @classmethod
    def collect(cls, trainer: Any, value: Any) -> Self:
        """Collect the state of the trainer. All ranks must call this method, because it gathers sharded weights."""
        is_fit = trainer.state.fn == "fit"
        states = {callback.state_key: _try(callback.state_dict) or {} for callback in trainer.callbacks}
        if not is_fit:  # only `fit` decides where checkpoints go
            states = {key: state for key, state in states.items() if not state.keys() & set(CHECKPOINT_PATHS)}
        return cls(
            value,
            trainer.state,
            trainer.should_stop,
            {name: getattr(trainer, name) for name in METRICS},
            _get_checkpoint_paths(trainer) if is_fit else {},
            states,
            trainer.fit_loop.state_dict(),
            _gather_whole_weights(trainer.strategy) if is_fit else {},
        )

    def restore(self, trainer: Any) -> None:
        if self.weights:
            _load_weights(trainer.lightning_module, self.weights)
        trainer.state, trainer.should_stop = self.state, self.should_stop
        for name, metrics in self.metrics.items():
            own_metrics = getattr(trainer, name)
            own_metrics.clear()
            own_metrics.update(metrics)
        trainer.fit_loop.load_state_dict(self.progress)
        trainer.fit_loop.restarting = False  # load_state_dict sets it, but the caller's trainer does not resume from here
        for callback in trainer.callbacks:  # the trainers of the ranks may have had others
            if state := self.callback_states.get(callback.state_key):
                vars(callback).update({name: state[name] for name in CHECKPOINT_PATHS if name in state})
                _try(callback.load_state_dict, state)
        # `configure_callbacks` of the module may have replaced the checkpoint callback in the ranks.
        if trainer.checkpoint_callback:
            vars(trainer.checkpoint_callback).update(self.checkpoint_paths)


def _get_checkpoint_paths(trainer: Any) -> dict[str, Any]:
    attributes = vars(trainer.checkpoint_callback) if trainer.checkpoint_callback else {}
    return {name: attributes[name] for name in CHECKPOINT_PATHS if name in attributes}


def _gather_whole_weights(strategy: Any) -> Any:
    for name, value in WHOLE_WEIGHTS_OPTIONS.items():
        if hasattr(strategy, name):
            setattr(strategy, name, value)
    return strategy.lightning_module_state_dict()


def _try(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the user's object, which may raise anything. The training has succeeded."""
    try:
        return method(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        name = f"{method.__name__} of {type(method.__self__).__name__}"
        warnings.warn(f"the caller's Trainer does not have all state of rank 0: {name} raised {error!r}", stacklevel=2)


def _load_weights(module: Any, weights: dict[str, Any]) -> None:
    """Load the weights for which the caller's module has layers: `configure_model` may have added others."""
    keys = _try(module.load_state_dict, weights, strict=False)
    lost = [*getattr(keys, "missing_keys", ()), *getattr(keys, "unexpected_keys", ())]
    if lost:
        text = (
            f"the caller's {type(module).__name__} differs from the module that was trained, so some weights were not "
            f"loaded: {', '.join(lost):.500}; load them from a checkpoint"
        )
        warnings.warn(text, stacklevel=2)
