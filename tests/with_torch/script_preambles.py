"""A program with the usual beginnings of training scripts. Its functions use them, and all of torch's stand-ins for modules."""

import argparse
import logging
import sys
import threading
from contextlib import nullcontext
from types import ModuleType

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import mpwatch

logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(sys.stderr)])
logger = logging.getLogger(__name__)

torch.set_float32_matmul_precision("high")
torch.backends.cudnn.benchmark = True

args = argparse.Namespace(lr=0.1, epochs=2)
config = {key: value for key, value in vars(args).items() if isinstance(value, int | float)}
device = torch.device("cpu")
dtype = torch.bfloat16
ctx = nullcontext() if device.type == "meta" else torch.amp.autocast(device_type=device.type, dtype=dtype)
scaler = torch.amp.GradScaler("cpu")
generator = torch.Generator().manual_seed(1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
loader = DataLoader(TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.long)), batch_size=2)
aten = torch.ops.aten
best_loss = float("inf")
lock = threading.Lock()  # used by no rank


@torch.no_grad()
def evaluate():
    return [F.cross_entropy(model(x), y).item() for x, y in loader]


class Trainer:
    def __init__(self):
        self.logger = logging.getLogger("Trainer")

    def fit(self):
        global best_loss
        for x, y in tqdm(loader, disable=True):
            with ctx:
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            best_loss = min(best_loss, loss.item())
        self.logger.info("best loss %s", best_loss)
        return best_loss < float("inf")


trainer = Trainer()


def main(stand_ins):
    logger.info("started with %s", config)
    assert all(stand_in is sys.modules[name] for name, stand_in in stand_ins.items())
    torch._dynamo.config.suppress_errors = inductor_config.max_autotune = torch.backends.cudnn.deterministic = False
    assert aten.add(torch.ones(1), torch.ones(1)) == 2
    assert Trainer().fit()
    assert trainer.fit()
    assert len(evaluate()) == 2
    assert generator.initial_seed() == 1
    return dtype, device, stand_ins


if __name__ == "__main__":
    named = {name: value for name, value in sys.modules.items() if name.startswith("torch")}
    named = {name: value for name, value in named.items() if type(value) is not ModuleType}
    assert named.keys() > {"torch.backends.cudnn", "torch.ops", "torch.classes", "torch._dynamo.config"}
    *back, stand_ins = mpwatch.run(main, 1, args=(named,))[0]
    assert back == [dtype, device]
    assert all(stand_ins[name] is value for name, value in named.items())
    print("done")
