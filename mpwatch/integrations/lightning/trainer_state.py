"""Where a trainer of Lightning's has come to: gathered in the ranks, and brought to the caller's trainer.

With its public names wherever it has some; nothing of it is imported here.
"""

import warnings
from dataclasses import dataclass
from typing import Any, Self

METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
WHOLE = {"_state_dict_type": "full", "_save_distributed_checkpoint": False}  # what strategies that shard call it
PLACES = ("dirpath", "best_model_path")  # of a callback that writes checkpoints: where, which it finds out in the rank


@dataclass
class TrainerState:
    """Where a trainer has come to in rank 0."""

    value: Any
    state: Any
    should_stop: bool
    metrics: dict[str, Any]
    callbacks: dict[str, Any]
    places: dict[str, dict[str, Any]]
    progress: dict[str, Any]
    weights: Any

    @classmethod
    def of(cls, trainer: Any, value: Any) -> Self:
        """Called in all ranks, since what is spread over them is gathered."""
        fits = trainer.state.fn == "fit"
        # where checkpoints go is settled by fit: before it, its logger may yet choose another folder than in these ranks
        callbacks = [callback for callback in trainer.callbacks if fits or not _places_of(callback)]
        return cls(
            value,
            trainer.state,
            trainer.should_stop,
            {name: getattr(trainer, name) for name in METRICS},
            {callback.state_key: callback.state_dict() for callback in callbacks},
            {callback.state_key: _places_of(callback) for callback in callbacks},
            trainer.fit_loop.state_dict(),
            _whole_weights(trainer.strategy) if fits else {},
        )

    def bring_to(self, trainer: Any) -> None:
        """The caller's. Its weights come first: whatever the rest does, they are worth the most."""
        if self.weights:
            _load(trainer.lightning_module, self.weights)
        trainer.state, trainer.should_stop = self.state, self.should_stop
        for name, metrics in self.metrics.items():
            known = getattr(trainer, name)
            known.clear()
            known.update(metrics)
        for callback in trainer.callbacks:  # the ranks may have had more
            vars(callback).update(self.places.get(callback.state_key, {}))
            if state := self.callbacks.get(callback.state_key):
                callback.load_state_dict(state)
        trainer.fit_loop.load_state_dict(self.progress)
        trainer.fit_loop.restarting = False  # it is not to go on from there


def _places_of(callback: Any) -> dict[str, Any]:
    return {name: vars(callback)[name] for name in PLACES if name in vars(callback)}


def _whole_weights(strategy: Any) -> Any:
    """In rank 0; gathered from all ranks where each has a part, however those were to be written into checkpoints."""
    for name, whole in WHOLE.items():
        if hasattr(strategy, name):
            setattr(strategy, name, whole)
    return strategy.lightning_module_state_dict()


def _load(module: Any, weights: dict[str, Any]) -> None:
    """As far as the caller's module has a place for them: it may have got other layers in the ranks."""
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False)
        lost = [*missing, *unexpected]
    except RuntimeError as error:  # all that fits has been taken over
        lost = [error]
    if lost:
        warnings.warn(
            f"the caller's {type(module).__name__} differs from the one that was trained, and has not got all its weights: "
            f"{', '.join(map(str, lost)):.500}; load them from a checkpoint",
            stacklevel=2,
        )
