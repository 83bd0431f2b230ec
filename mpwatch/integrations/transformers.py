"""A callback for the Trainer of Hugging Face transformers, which makes all ranks save and stop at the same step."""

from importlib import import_module
from typing import Any

import mpwatch

__all__ = ["StopTogether"]

TrainerCallback: Any = import_module("transformers").TrainerCallback


class StopTogether(TrainerCallback):  # type: ignore[misc]  # Any
    """Makes the Trainer save a checkpoint and end the training when a stop is requested. See `mpwatch.should_stop`.

    Call `Trainer(..., callbacks=[StopTogether()])` in the function that you run with `mpwatch.run(..., stop=...)`.
    To continue the training later, call `trainer.train(resume_from_checkpoint=True)`. The callback passes
    `state.global_step` to `mpwatch.should_stop`. In a process that is not a rank, the callback does nothing.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
        """After each step, ask `mpwatch.should_stop` whether the ranks stop now."""
        if mpwatch.should_stop(state.global_step):
            control.should_save = control.should_training_stop = True
        return control
