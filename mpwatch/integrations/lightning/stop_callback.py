"""A callback for Lightning's Trainer, with which all ranks save and stop at the same step.

If `lightning` is installed, StopTogether is a subclass of the class Callback of `lightning`. A Trainer of
`pytorch_lightning` accepts StopTogether, too, because StopTogether has all methods that the Trainer calls.
"""

from importlib import import_module
from importlib.util import find_spec
from os import PathLike, fspath
from typing import Any

import mpwatch

__all__ = ["StopTogether"]

Callback: Any = import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning").Callback


class StopTogether(Callback):  # type: ignore[misc]  # Any
    """Makes the Trainer stop at the same step in all ranks when a stop of the run is requested. See `mpwatch.should_stop`.

    Example: `Trainer(strategy=watched(DDPStrategy(), stop=[signal.SIGUSR1]), callbacks=[StopTogether("a.ckpt")])`.
    To continue the training later, pass the path of the saved checkpoint to `fit`: `trainer.fit(..., ckpt_path="a.ckpt")`.
    The callback passes `trainer.global_step` as the step to `mpwatch.should_stop`. If the current epoch has a validation,
    Lightning runs the validation before the Trainer stops. The Trainer does not stop before `min_steps` and `min_epochs` are
    reached. Outside a rank the callback does nothing.

    Args:
        checkpoint: the file to which the Trainer saves its state before it stops. None means that nothing is saved.
    """

    def __init__(self, checkpoint: str | PathLike[str] | None = None) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """After each batch, ask `mpwatch.should_stop` whether the ranks stop now."""
        if not trainer.should_stop and mpwatch.should_stop(trainer.global_step):
            trainer.should_stop = True
            if self._checkpoint is not None:
                trainer.save_checkpoint(fspath(self._checkpoint))
