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
    first_checkpoint_paths: dict[str, Any]  # the paths of `trainer.checkpoint_callback`
    checkpoint_paths: dict[str, dict[str, Any]]
    callback_states: dict[str, Any]
    progress: dict[str, Any]
    weights: Any
    problems: list[str]  # texts that say which state could not be collected, and why

    @classmethod
    def collect(cls, trainer: Any, value: Any) -> Self:
        """Collect the state of the trainer. All ranks must call this method, because it gathers sharded weights."""
        is_fit = trainer.state.fn == "fit"
        weights = _gather_whole_weights(trainer.strategy) if is_fit else {}
        paths, states, problems = {}, {}, []
        for callback in trainer.callbacks:
            own_paths = _get_checkpoint_paths(callback)
            # Only `fit` decides where checkpoints go. The caller's logger may choose another folder before `fit`.
            if own_paths and not is_fit:
                continue
            try:
                paths[callback.state_key] = own_paths
                states[callback.state_key] = callback.state_dict()
            except Exception as error:  # noqa: BLE001  for example, `teardown` has deleted the state
                problems.append(_describe_problem(callback, "state_dict", "in rank 0", error))
        return cls(
            value,
            trainer.state,
            trainer.should_stop,
            {name: getattr(trainer, name) for name in METRICS},
            _get_checkpoint_paths(trainer.checkpoint_callback) if is_fit and trainer.checkpoint_callback else {},
            paths,
            states,
            trainer.fit_loop.state_dict(),
            weights,
            problems,
        )

    def restore(self, trainer: Any) -> None:
        """Copy the state into the caller's trainer. What cannot be loaded is warned about at the end, since a filter may
        raise.
        """
        problems = [*self.problems]
        if self.weights:
            problems += _load_weights(trainer.lightning_module, self.weights)
        trainer.state, trainer.should_stop = self.state, self.should_stop
        for name, metrics in self.metrics.items():
            own_metrics = getattr(trainer, name)
            own_metrics.clear()
            own_metrics.update(metrics)
        trainer.fit_loop.load_state_dict(self.progress)
        trainer.fit_loop.restarting = False  # load_state_dict sets it, but the caller's trainer does not resume from here
        # `configure_callbacks` of the module may have replaced the checkpoint callback in the ranks.
        if trainer.checkpoint_callback:
            vars(trainer.checkpoint_callback).update(self.first_checkpoint_paths)
        for callback in trainer.callbacks:  # the trainers of the ranks may have had more callbacks
            try:
                vars(callback).update(self.checkpoint_paths.get(callback.state_key, {}))
                if state := self.callback_states.get(callback.state_key):
                    callback.load_state_dict(state)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  the training has succeeded
                where = "in the caller, where Lightning does not call its setup"
                problems.append(_describe_problem(callback, "load_state_dict", where, error))
        for problem in problems:
            warnings.warn(problem, stacklevel=2)


def _describe_problem(callback: Any, method: str, where: str, error: BaseException) -> str:
    return (
        f"the caller's {type(callback).__name__} does not have the state of rank 0: "
        f"its {method} raised {type(error).__name__} {where}: {error!s:.500}"
    )


def _get_checkpoint_paths(callback: Any) -> dict[str, Any]:
    return {name: vars(callback)[name] for name in CHECKPOINT_PATHS if name in vars(callback)}


def _gather_whole_weights(strategy: Any) -> Any:
    for name, value in WHOLE_WEIGHTS_OPTIONS.items():
        if hasattr(strategy, name):
            setattr(strategy, name, value)
    return strategy.lightning_module_state_dict()


def _load_weights(module: Any, weights: dict[str, Any]) -> list[str]:
    """Load the weights for which the caller's module has layers, and return problems: `configure_model` may have added
    others.
    """
    try:
        keys = module.load_state_dict(weights, strict=False)  # a method of the user may return None
        lost = [*getattr(keys, "missing_keys", ()), *getattr(keys, "unexpected_keys", ())]
    except Exception as error:  # noqa: BLE001  torch's own method has loaded all weights that fit
        lost = [f"{type(error).__name__}: {error}"]
    text = (
        f"the caller's {type(module).__name__} differs from the module that was trained, so some weights were not "
        f"loaded: {', '.join(lost):.500}; load them from a checkpoint"
    )
    return [text] if lost else []
