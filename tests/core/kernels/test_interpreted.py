"""Every Triton kernel in Triton's interpreter against float64 on torch, forward and backward."""

import pytest
import torch

from .calls import CALLS, TOLERANCE, compare, inputs_of, reference, results

pytestmark = pytest.mark.usefixtures("interpreter")
CASES = [(name, shape) for name, call in CALLS.items() for shape in call.shapes]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_float64(name, shape):
    inputs = inputs_of(CALLS[name], shape, torch.float64)
    compare(results(CALLS[name], inputs, "triton"), reference(CALLS[name], inputs), TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_narrow(name, dtype):
    inputs = inputs_of(CALLS[name], CALLS[name].shapes[0], dtype)
    found = results(CALLS[name], inputs, "triton")
    compare(found, reference(CALLS[name], inputs), TOLERANCE[dtype])
    assert {key: value.dtype for key, value in found.items()} == {
        key: value.dtype for key, value in results(CALLS[name], inputs, "torch").items()
    }
