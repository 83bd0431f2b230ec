"""The state of a Lightning trainer, which rank 0 sends back to the caller's trainer.

This module does not import Lightning, and uses private names of Lightning only where no public names exist.
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
