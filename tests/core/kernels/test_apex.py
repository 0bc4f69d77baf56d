"""apex's fused norms and softmax behind the operations: on a stand-in with the signatures of apex's source, as apex
needs a CUDA build of its own. Nothing here has run on apex."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from gridtron.core.kernels.apex import takes_softmax
from gridtron.core.kernels.layer_norm import layer_norm
from gridtron.core.kernels.rms_norm import rms_norm
from gridtron.core.kernels.scaled_masked_softmax import scaled_masked_softmax

calls: list[str] = []


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    assert input.numel() and input.dtype == weight.dtype and tuple(normalized_shape) == tuple(weight.shape)
    calls.append("fused_rms_norm_affine")
    return F.rms_norm(input, tuple(normalized_shape), weight, eps)


def mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    calls.append("mixed_dtype_fused_rms_norm_affine")
    return F.rms_norm(input.to(weight.dtype), tuple(normalized_shape), weight, eps)


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    assert input.numel() and input.dtype == weight.dtype == bias.dtype and bias.shape == weight.shape
    calls.append("fused_layer_norm_affine")
    return F.layer_norm(input, tuple(normalized_shape), weight, bias, eps)


def mixed_dtype_fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    assert weight.dtype == bias.dtype
    calls.append("mixed_dtype_fused_layer_norm_affine")
    return F.layer_norm(input.to(weight.dtype), tuple(normalized_shape), weight, bias, eps)


def scaled_upper_triang_masked_softmax(inputs, _, scale):
    b, np, sq, sk = inputs.size()
    assert sq == sk, "causal mask is only for self attention"
    flat = inputs.view(-1, sq, sk)
    # What the extension checks, and what its launch divides by.
    assert flat.dtype in (torch.float16, torch.bfloat16) and sk <= 2048 and flat.shape[0] % (8 if sk <= 128 else 4) == 0
    calls.append("scaled_upper_triang_masked_softmax")
    future = torch.ones(sq, sk, dtype=torch.bool).triu(1)
    return (flat.float() * scale).masked_fill(future, float("-inf")).softmax(-1).to(inputs.dtype).view(b, np, sq, sk)


@pytest.fixture(autouse=True)
def apex(monkeypatch):
    calls.clear()
    members = {
        "apex": (),
        "apex.normalization": (),
        "apex.normalization.fused_layer_norm": (
            fused_rms_norm_affine,
            mixed_dtype_fused_rms_norm_affine,
            fused_layer_norm_affine,
            mixed_dtype_fused_layer_norm_affine,
        ),
        "apex.transformer": (),
        # The package's own __init__ does not hand the function on.
        "apex.transformer.functional": (),
        "apex.transformer.functional.fused_softmax": (scaled_upper_triang_masked_softmax,),
    }
    for name, functions in members.items():
        module = types.ModuleType(name)
        module.__dict__.update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)


def same(ours, theirs, leaves, tolerance):
    given = torch.randn_like(ours)
    pairs = zip(torch.autograd.grad(ours, leaves, given), torch.autograd.grad(theirs, leaves, given), strict=True)
    assert ours.dtype == theirs.dtype
    for a, b in [(ours, theirs), *pairs]:
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("wide_gain", [False, True])
def test_norms(dtype, tolerance, wide_gain):
    x = torch.randn(5, 3, 16).to(dtype).requires_grad_()
    weight, bias = (torch.randn(16, dtype=torch.float32 if wide_gain else dtype, requires_grad=True) for _ in range(2))
    kind = "mixed_dtype_" if wide_gain and dtype != torch.float32 else ""
    if not kind:
        same(rms_norm(x, weight, 1e-5, "apex"), rms_norm(x, weight, 1e-5, "torch"), (x, weight), tolerance)
        with_bias = (layer_norm(x, weight, bias, 1e-5, backend) for backend in ("apex", "torch"))
        same(*with_bias, (x, weight, bias), tolerance)
        without = (layer_norm(x, weight, None, 1e-5, backend) for backend in ("apex", "torch"))
        same(*without, (x, weight), tolerance)
        assert calls == ["fused_rms_norm_affine", "fused_layer_norm_affine", "fused_layer_norm_affine"]
        return
    assert rms_norm(x, weight, 1e-5, "apex").dtype == layer_norm(x, weight, bias, 1e-5, "apex").dtype == dtype
    assert calls == ["mixed_dtype_fused_rms_norm_affine", "mixed_dtype_fused_layer_norm_affine"]


def test_nothing_is_not_launched():
    weight = torch.ones(8)
    assert rms_norm(torch.ones(0, 8), weight, 1e-5, "apex").shape == (0, 8)
    assert layer_norm(torch.ones(0, 8), weight, None, 1e-5, "apex").shape == (0, 8)
    assert not calls


@pytest.mark.parametrize("length", [20, 132])
def test_softmax(length):
    scores = torch.randn(2, 4, length, length).to(torch.bfloat16).requires_grad_()
    ours, theirs = (scaled_masked_softmax(scores, 0.3, backend=backend) for backend in ("apex", "torch"))
    same(ours, theirs, (scores,), 1e-2)
    assert calls == ["scaled_upper_triang_masked_softmax"]


@pytest.mark.parametrize(
    ("shape", "dtype", "causal", "masked"),
    [
        ((2, 4, 20, 20), torch.float32, True, False),
        ((2, 4, 20, 20), torch.bfloat16, False, False),
        ((2, 4, 20, 20), torch.bfloat16, True, True),
        ((2, 4, 20, 24), torch.bfloat16, True, False),
        ((2, 4, 16, 16), torch.bfloat16, True, False),
        ((2, 4, 21, 21), torch.bfloat16, True, False),
        ((1, 4, 20, 20), torch.bfloat16, True, False),
        ((0, 4, 20, 20), torch.bfloat16, True, False),
    ],
    ids=str,
)
def test_what_apex_does_not_take_is_torchs(shape, dtype, causal, masked):
    scores = torch.randn(shape).to(dtype)
    mask = torch.rand(shape) < 0.2 if masked else None
    found = scaled_masked_softmax(scores, 0.3, causal, mask, "apex")
    assert torch.equal(found, scaled_masked_softmax(scores, 0.3, causal, mask, "torch")) and not calls


def test_sizes_that_apex_takes():
    taken = [
        (keys, heads)
        for keys in (128, 132, 2048, 2052)
        for heads in (4, 8)
        if takes_softmax(torch.empty(1, heads, keys, keys, dtype=torch.float16, device="meta"))
    ]
    assert taken == [(128, 8), (132, 4), (132, 8), (2048, 4), (2048, 8)]
