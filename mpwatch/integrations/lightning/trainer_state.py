"""The state of a Lightning trainer, which the ranks send back to the caller's trainer.

All ranks gather the state when their function has returned. The caller restores the state of rank 0. This module imports
nothing of Lightning, and uses Lightning's public names where they exist.
"""

import warnings
from dataclasses import dataclass
from typing import Any, Self

METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
# Attributes of strategies that shard weights, with the values that make them return whole weights.
WHOLE_WEIGHTS_OPTIONS = {"_state_dict_type": "full", "_save_distributed_checkpoint": False}
CHECKPOINT_PATHS = ("dirpath", "best_model_path")  # attributes of a checkpoint callback, which are set in the rank


@dataclass
class TrainerState:
    """The state of the trainer in rank 0, and the value that its function returned."""

    value: Any
    state: Any
    should_stop: bool
    metrics: dict[str, Any]
    callback_states: dict[str, Any]
    checkpoint_paths: dict[str, dict[str, Any]]
    progress: dict[str, Any]
    weights: Any

    @classmethod
    def collect(cls, trainer: Any, value: Any) -> Self:
        """Collect the state of the trainer. All ranks must call it, since sharded weights are gathered."""
        is_fit = trainer.state.fn == "fit"
        # Only `fit` decides where checkpoints go. Before it, the caller's logger may choose another folder than the ranks'.
        callbacks = [callback for callback in trainer.callbacks if is_fit or not _get_checkpoint_paths(callback)]
        return cls(
            value,
            trainer.state,
            trainer.should_stop,
            {name: getattr(trainer, name) for name in METRICS},
            {callback.state_key: callback.state_dict() for callback in callbacks},
            {callback.state_key: _get_checkpoint_paths(callback) for callback in callbacks},
            trainer.fit_loop.state_dict(),
            _gather_whole_weights(trainer.strategy) if is_fit else {},
        )

    def restore(self, trainer: Any) -> None:
        """Copy the state into the caller's trainer. The weights come first: if a later step fails, they are not lost."""
        if self.weights:
            _load_weights(trainer.lightning_module, self.weights)
        trainer.state, trainer.should_stop = self.state, self.should_stop
        for name, metrics in self.metrics.items():
            own_metrics = getattr(trainer, name)
            own_metrics.clear()
            own_metrics.update(metrics)
        for callback in trainer.callbacks:  # the trainers of the ranks may have had more callbacks
            vars(callback).update(self.checkpoint_paths.get(callback.state_key, {}))
            if state := self.callback_states.get(callback.state_key):
                callback.load_state_dict(state)
        trainer.fit_loop.load_state_dict(self.progress)
        trainer.fit_loop.restarting = False  # load_state_dict sets it, but the caller's trainer does not resume from here


def _get_checkpoint_paths(callback: Any) -> dict[str, Any]:
    return {name: vars(callback)[name] for name in CHECKPOINT_PATHS if name in vars(callback)}


def _gather_whole_weights(strategy: Any) -> Any:
    """Return the whole weights in rank 0, also if the options of the strategy ask for sharded checkpoints."""
    for name, value in WHOLE_WEIGHTS_OPTIONS.items():
        if hasattr(strategy, name):
            setattr(strategy, name, value)
    return strategy.lightning_module_state_dict()


def _load_weights(module: Any, weights: dict[str, Any]) -> None:
    """Load the weights that the caller's module has a layer for, and warn about others.

    The module may have got other layers in the ranks, for example in `configure_model`.
    """
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False)
        lost = [*missing, *unexpected]
    except RuntimeError as error:  # load_state_dict has loaded all weights that fit
        lost = [error]
    if lost:
        warnings.warn(
            f"the caller's {type(module).__name__} differs from the module that was trained, so some weights were not "
            f"loaded: {', '.join(map(str, lost)):.500}; load them from a checkpoint",
            stacklevel=2,
        )
