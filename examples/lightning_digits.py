"""Train on handwritten digits with Lightning, on two ranks that mpwatch watches. The script needs no `__main__` guard.

Only `strategy=watched(DDPStrategy())` is not ordinary Lightning: the ranks are children of this process, and none of them
runs this script. The data are the 1,797 images that come with scikit-learn. Run it with
`python examples/lightning_digits.py`.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mpwatch.integrations.lightning import watched


class DigitNet(LightningModule):
    """Two convolutions and a linear layer for 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the ten digits for each image."""
        scores: torch.Tensor = self.layers(images)
        return scores

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam as optimizer."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test images, split in a fixed random order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


torch.manual_seed(1)
training, test = digits()
model = DigitNet()
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=watched(DDPStrategy()),
    max_epochs=8,
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(model, DataLoader(training, batch_size=32, shuffle=True))
print(f"after {trainer.current_epoch} epochs on 2 ranks: loss {trainer.callback_metrics['loss']:.4f}")
images, labels = test.tensors
print(f"test accuracy: {100 * (model(images).argmax(1) == labels).float().mean():.1f}%")  # the model has the trained weights
