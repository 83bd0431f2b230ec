"""A program whose functions are compiled by torch, and use each object of torch that stands in for a module."""

import sys
from types import ModuleType

import torch
import torch._dynamo
import torch._inductor.config as inductor_config

import mpwatch


@torch.compile(backend="eager", fullgraph=True)
def add_one(x):
    return x + 1


@torch.compile(backend="eager", dynamic=True)
@torch.no_grad()
def double(x):
    return 2 * x


class Net(torch.nn.Module):
    def forward(self, x):
        return double(x)


net = torch.compile(Net(), backend="eager")


def use_configs():
    torch._dynamo.config.suppress_errors = False
    torch._inductor.config.max_autotune = inductor_config.max_autotune = False
    torch._functorch.config.donated_buffer = False
    return torch.classes.loaded_libraries is torch.ops.loaded_libraries


def main(stand_ins):
    from torch._dynamo.utils import counters

    assert all(stand_in is sys.modules[name] for name, stand_in in stand_ins.items())
    assert use_configs()
    assert add_one(torch.ones(2)).tolist() == double(torch.ones(2)).tolist() == net(torch.ones(2)).tolist() == [2, 2]
    return stand_ins, counters["stats"]["unique_graphs"]


if __name__ == "__main__":
    named = {name: value for name, value in sys.modules.items() if name.startswith("torch")}
    named = {name: value for name, value in named.items() if type(value) is not ModuleType}
    assert named.keys() > {"torch.backends.cudnn", "torch.ops", "torch.classes", "torch._dynamo.config"}
    for back, graphs in mpwatch.run(main, 1, args=(named,)):
        assert all(back[name] is value for name, value in named.items())
        assert graphs >= 2
    print("done")
