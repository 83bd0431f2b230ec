"""Tensors as arguments and return values: their memory is mapped, and tensors that shared memory share it again."""

import os
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import mpwatch
from wire.pickling.test_payload import both_ways, list_mappings, send_as_argument, send_as_value
from worker import last_imports

MANY = 1 << 15


@pytest.fixture(autouse=True)
def _fresh_main_module(monkeypatch):
    """`unpack` writes to the module `__main__`."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))


def is_mapped(tensor):
    return any(tensor.data_ptr() in mapping for mapping in list_mappings())


TYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.bool,
    torch.complex64,
    torch.int8,
    torch.uint16,
    torch.float8_e4m3fn,
)


@both_ways
@pytest.mark.parametrize("size", [0, 1, 4 * MANY])
def test_a_tensor_of_any_type(sent, size):
    for dtype in TYPES:
        tensor = torch.arange(size).to(dtype)
        came = sent(tensor)
        assert (came.dtype, came.shape) == (dtype, tensor.shape)
        assert torch.equal(came.view(torch.uint8), tensor.view(torch.uint8))
        assert is_mapped(came) is (size > 1)
        came.zero_()


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_tensor_with_an_attribute(sent, dtype):
    tensor = torch.ones(2 * MANY).to(dtype)
    tensor.scale = 0.5
    came = sent(tensor)
    assert (came.dtype, came.scale) == (dtype, 0.5)
    assert is_mapped(came)


@both_ways
@pytest.mark.parametrize("size", [2, MANY])
def test_tensors_that_shared_memory_share_it(sent, size):
    whole = torch.zeros(2 * size)
    came, again, half, column, twin = sent([whole, whole, whole[size:], whole.view(2, -1)[:, 1], whole.detach()])
    assert again is came
    came.fill_(3)
    assert half.storage_offset() == size
    assert set(half.tolist()) == set(column.tolist()) == set(twin.tolist()) == {3.0}
    assert set(whole.tolist()) == {0.0}


@both_ways
def test_a_small_tensor_can_be_resized_as_before(sent):
    assert sent(torch.zeros(2)).resize_(1000).shape == (1000,)


@both_ways
def test_modules_keep_tied_weights_and_references_to_them(sent):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)
            self.second.weight = self.first.weight
            self.register_buffer("mean", torch.zeros(3))

    model = Tied()
    momenta = {weight: torch.ones_like(weight) for weight in model.parameters()}  # as an optimizer has them
    came, its_momenta = sent((model, momenta))
    assert came.second.weight is came.first.weight
    assert isinstance(came.first.weight, nn.Parameter)
    assert came.first.weight.requires_grad
    assert list(its_momenta) == list(came.parameters())
    assert all(torch.equal(a, b) for a, b in zip(came.state_dict().values(), model.state_dict().values(), strict=True))
    came.second(came.first(torch.ones(256))).sum().backward()
    with torch.no_grad():
        came.first.weight -= came.first.weight.grad
    assert not torch.equal(came.second.weight, model.first.weight)


@both_ways
@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_that_consist_of_several_tensors(sent):
    sparse = torch.eye(300).to_sparse()
    assert torch.equal(sent(sparse).to_dense(), sparse.to_dense())
    rows = torch.eye(300).to_sparse_csr()
    assert torch.equal(sent(rows).to_dense(), rows.to_dense())
    assert sent(torch.empty(3, device="meta")).device.type == "meta"
    assert sent(torch.arange(10).untyped_storage()).tolist()[::8] == list(range(10))


@both_ways
@pytest.mark.filterwarnings("ignore")  # torch warns that quantization is deprecated
def test_a_quantized_tensor(sent):
    quantized = torch.quantize_per_tensor(torch.arange(float(4 * MANY)), 0.5, 10, torch.quint8)
    assert torch.equal(sent(quantized).int_repr(), quantized.int_repr())


@both_ways
def test_the_memory_of_a_tensor_goes_with_it(sent):
    before = list_mappings()
    came = sent(torch.zeros(MANY))
    row = came[5:]
    del came
    assert len(list_mappings()) == len(before) + 1
    del row
    assert list_mappings() == before


def test_arguments_in_shared_memory_stay_there():
    shared = torch.zeros(MANY).share_memory_()
    descriptors = len(os.listdir("/proc/self/fd"))
    came = send_as_argument(shared)
    assert came.is_shared()
    came.fill_(2)
    assert set(shared.tolist()) == {2.0}
    assert not send_as_value(shared).is_shared()
    del came
    assert len(os.listdir("/proc/self/fd")) == descriptors


def sum_tensor(tensor):
    total = tensor.sum().item()
    tensor.zero_()
    return total


def test_slices_of_a_tensor():
    tensor = torch.arange(400_000)
    result = mpwatch.run(sum_tensor, 2, args=(mpwatch.PerRank(tensor.chunk(2)),))
    assert list(result) == [part.sum().item() for part in tensor.chunk(2)]


def test_a_tensor_from_a_rank_that_can_import_nothing_more():
    def fn():
        tensor = torch.ones(1 << 20)
        last_imports.forget_all_modules(None)
        return tensor

    (value,) = mpwatch.run(fn, 1)
    assert value.sum() == 1 << 20
