"""Train on handwritten digits with Hugging Face accelerate, on two ranks of mpwatch.

The training function is an ordinary one. `Accelerator()` finds what it needs, on CPUs and on GPUs, so nothing has to be
configured. The net and the data are those of train_digits.py. Run it with `python examples/accelerate_digits.py`.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader
from train_digits import DigitNet, digits

import mpwatch


def train(epochs: int) -> float:
    """Train the net. Return the accuracy on the test images, which is the same in all ranks."""
    from accelerate import Accelerator  # takes seconds, and only the ranks need it

    accelerator = Accelerator()
    torch.manual_seed(1)
    training, test = (DataLoader(images, batch_size=32, shuffle=True) for images in digits())
    net = DigitNet()
    model, optimizer, training, test = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=2e-3), training, test)
    for epoch in range(epochs):
        for images, labels in training:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        mpwatch.report(step=epoch + 1, total=epochs, loss=loss)
        accelerator.print(f"epoch {epoch + 1:2d}  loss {accelerator.reduce(loss.detach(), 'mean'):.4f}", flush=True)
    model.eval()
    with torch.no_grad():
        correct = [accelerator.gather_for_metrics(model(images).argmax(1) == labels) for images, labels in test]
    return float(torch.cat(correct).float().mean())


if __name__ == "__main__":
    result = mpwatch.run(train, nprocs=2, args=(12,))
    print(f"test accuracy, of {len(result)} ranks together: {result[0]:.1%}")
