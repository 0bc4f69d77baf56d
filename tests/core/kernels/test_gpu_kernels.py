"""The Triton kernels on a CUDA device (`make test-gpu`): tuned, compiled and run at sizes in use."""

import pytest
import torch

from gridtron.core import random
from gridtron.core.kernels.dropout_add import counted_dropout

from .calls import CALLS, TOLERANCE, compare, inputs_of, reference, results

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
# Sums over thousands of rows on a device add up in another order than the reference's.
LARGE = {**TOLERANCE, torch.float32: 3e-6, torch.float64: 1e-11}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_odd_sizes(name, dtype):
    for shape in CALLS[name].shapes:
        inputs = inputs_of(CALLS[name], shape, dtype, "cuda")
        compare(results(CALLS[name], inputs, "triton"), reference(CALLS[name], inputs), LARGE[dtype])


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_sizes_in_use(name, dtype):
    inputs = inputs_of(CALLS[name], CALLS[name].large, dtype, "cuda")
    compare(results(CALLS[name], inputs, "triton"), reference(CALLS[name], inputs), LARGE[dtype])


@pytest.mark.parametrize("name", CALLS)
def test_auto_is_triton_on_a_device(name):
    if CALLS[name].operation == "adamw":
        return
    inputs = inputs_of(CALLS[name], CALLS[name].shapes[0], torch.float32, "cuda")
    auto, triton = (results(CALLS[name], inputs, backend) for backend in ("auto", "triton"))
    assert all(torch.equal(auto[key], triton[key]) for key in triton)


@pytest.mark.parametrize("hidden", [16, 7, 4096])
def test_masks_are_the_cpus_to_the_bit(hidden):
    x = torch.ones(12, 6, hidden)
    place = (1, [5, 0, 0], [hidden, 0, 1])
    samples = torch.arange(6) * 3 + 2**40
    ours = counted_dropout(x.cuda(), 0.1, -77, samples.cuda(), *place, backend="triton")
    assert torch.equal(ours.cpu(), random.counted_dropout(x, 0.1, -77, samples, *place))


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope", "softmax", "dropout_add"])
def test_compiled_graphs(name):
    call = CALLS[name]
    inputs = inputs_of(call, call.shapes[0], torch.float32, "cuda")
    traced = torch.compile(call.run, fullgraph=True)
    found = results(type(call)(**{**vars(call), "run": traced}), inputs, "triton")
    compare(found, results(call, inputs, "triton"), 1e-6)
