"""Train on handwritten digits with PyTorch-Ignite, on two ranks of mpwatch.

Ignite's engines, metrics and `idist` use the process group of `backend="gloo"`. `idist.Parallel()` inside the function finds
it too. A function with `idist.Parallel(backend="gloo")` makes the process group itself: call it without `backend`. The net
and the data are those of train_digits.py. Run it with `python examples/ignite_digits.py`.
"""

import torch
from torch import nn
from train_digits import DigitNet, digits

import mpwatch


def train(epochs: int) -> float:
    """Train the net. Return the accuracy on the test images, which is the same in all ranks."""
    import ignite.distributed as idist
    from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Accuracy

    torch.manual_seed(1)
    training, test = (idist.auto_dataloader(images, batch_size=32, shuffle=True) for images in digits())
    model = idist.auto_model(DigitNet())
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=2e-3))
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device=idist.device())
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device=idist.device())

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle(engine: Engine) -> None:
        training.sampler.set_epoch(engine.state.epoch)

    @trainer.on(Events.EPOCH_COMPLETED)
    def report_epoch(engine: Engine) -> None:
        mpwatch.report(step=engine.state.epoch, total=epochs, loss=engine.state.output)
        loss = idist.all_reduce(engine.state.output) / idist.get_world_size()
        if idist.get_rank() == 0:
            print(f"epoch {engine.state.epoch:2d}  loss {loss:.4f}", flush=True)

    trainer.run(training, max_epochs=epochs)
    return float(evaluator.run(test).metrics["accuracy"])


if __name__ == "__main__":
    result = mpwatch.run(train, nprocs=2, args=(12,), backend="gloo")
    print(f"test accuracy, of {len(result)} ranks together: {result[0]:.1%}")
