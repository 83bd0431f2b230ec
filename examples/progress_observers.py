"""Feed a progress bar of tqdm and TensorBoard from the reports of the ranks, in the caller's process.

python examples/progress_observers.py            # needs tqdm
python examples/progress_observers.py runs/one   # needs tensorboard, too
"""

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

import mpwatch
from mpwatch.events import Event, Progressed, RunEnded, wants_progress

STEPS = 40


def train() -> None:
    """Report the progress of this rank."""
    for step in range(1, STEPS + 1):
        time.sleep(0.02)
        mpwatch.report(step=step, total=STEPS, loss=1 / step)


class ProgressBar:
    """One bar for all ranks: the steps of the slowest one."""

    wants_progress = True

    def __init__(self) -> None:
        self.bar = tqdm(total=STEPS)
        self.steps: dict[int, int] = {}

    def __call__(self, event: Event) -> None:
        """Advance the bar to the step that all ranks have reached."""
        if isinstance(event, Progressed) and event.step is not None:
            self.steps[event.ranks[0]] = event.step
            self.bar.update(min(self.steps.values()) - self.bar.n)
            self.bar.set_postfix(event.metrics)
        elif isinstance(event, RunEnded):
            self.bar.close()


def make_tensorboard_observer(folder: str) -> Callable[[Event], None]:
    """Return an observer that writes the metrics of each rank as a curve of its own."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    @wants_progress
    def observe(event: Event) -> None:
        if isinstance(event, Progressed):
            for name, value in event.metrics.items():
                writer.add_scalars(name, {f"rank {event.ranks[0]}": value}, event.step, event.time)

    return observe


if __name__ == "__main__":
    observers = [ProgressBar(), *map(make_tensorboard_observer, sys.argv[1:2])]
    mpwatch.run(train, 2, on_event=observers, progress=False)
