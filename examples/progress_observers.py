"""Feed a progress bar of tqdm and TensorBoard from the reports of the ranks, in the caller's process.

python examples/progress_observers.py            # needs tqdm
python examples/progress_observers.py runs/one   # needs tensorboard, too
"""

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

import mpwatch
from mpwatch.events import Progressed

STEPS = 40


def train() -> None:
    """Report the progress of this rank."""
    for step in range(1, STEPS + 1):
        time.sleep(0.02)
        mpwatch.report(step=step, total=STEPS, loss=1 / step)


class ProgressBar:
    """One bar for all ranks: the steps of the slowest one."""

    def __init__(self) -> None:
        self.bar = tqdm(total=STEPS)
        self.steps: dict[int, int] = {}

    def __call__(self, event: Progressed) -> None:
        """Advance the bar to the step that all ranks have reached."""
        if event.step is not None:
            self.steps[event.ranks[0]] = event.step
            self.bar.update(min(self.steps.values()) - self.bar.n)
            self.bar.set_postfix(event.metrics)


def make_tensorboard_observer(folder: str) -> Callable[[Progressed], None]:
    """Return an observer that writes the metrics of each rank as a curve of its own."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def observe(event: Progressed) -> None:
        for name, value in event.metrics.items():
            writer.add_scalars(name, {f"rank {event.ranks[0]}": value}, event.step, event.time)

    return observe


if __name__ == "__main__":
    bar = ProgressBar()
    observers = [bar, *map(make_tensorboard_observer, sys.argv[1:2])]
    mpwatch.run(train, 2, on_progress=observers, progress=False)
    bar.bar.close()
