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


# ---------------------------------------------------------------- memory of any layout
def _strange(value):
    """The same numbers with gaps between neighbours and rows."""
    if not (isinstance(value, torch.Tensor) and value.ndim and value.is_floating_point()):
        return value
    wide = value.new_full((*(2 * size + 1 for size in value.shape),), float("nan"))
    part = wide[tuple(slice(1, None, 2) for _ in value.shape)]
    return part.copy_(value)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.operation != "adamw"])
def test_inputs_with_gaps(name):
    call = CALLS[name]
    inputs = inputs_of(call, call.shapes[0], torch.float64)
    strange = {key: _strange(value) for key, value in inputs.items()}
    compare(results(call, strange, "triton"), reference(call, inputs), TOLERANCE[torch.float64])


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.differentiated])
@pytest.mark.parametrize("kind", ["expanded", "transposed"])
def test_gradients_of_any_layout(name, kind):
    call = CALLS[name]
    inputs = inputs_of(call, call.shapes[0], torch.float64)

    def run(given, backend):
        leaves = {key: given[key].detach().requires_grad_() for key in call.differentiated}
        result = call.run({**given, **leaves}, backend)
        gradient = torch.ones((), dtype=torch.float64).expand(result.shape)
        if kind == "transposed":
            turned = tuple(reversed(result.shape))
            gradient = (
                torch.linspace(-1, 1, result.numel(), dtype=torch.float64)
                .view(turned)
                .permute(*reversed(range(result.ndim)))
            )
        return dict(zip(leaves, torch.autograd.grad(result, list(leaves.values()), gradient), strict=True))

    found, expected = run(inputs, "triton"), run(inputs, "torch")
    for key, theirs in expected.items():
        assert (found[key] - theirs).abs().max() <= 1e-11 * max(1.0, float(theirs.abs().max())), key


# ---------------------------------------------------------------- numbers of any size
@pytest.mark.parametrize("size", [1e-30, 1e4, 1e15])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "swiglu", "bias_gelu", "bias_gelu tanh", "softmax", "loss"])
def test_extremes_are_torchs(name, size):
    call = CALLS[name]
    inputs = inputs_of(call, call.shapes[0], torch.float32)
    inputs = {
        key: value * size if isinstance(value, torch.Tensor) and key in call.differentiated[:1] else value
        for key, value in inputs.items()
    }
    found, expected = results(call, inputs, "triton"), results(call, inputs, "torch")
    for key, theirs in expected.items():
        assert torch.equal(torch.isfinite(found[key]), torch.isfinite(theirs)), key
        torch.testing.assert_close(found[key], theirs, rtol=2e-5, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_stays_in_its_row(bad):
    for name in ("rms_norm", "layer_norm", "softmax", "loss"):
        call = CALLS[name]
        inputs = inputs_of(call, call.shapes[0], torch.float64)
        inputs[call.differentiated[0]].select(-2, 2).select(-1, 1).fill_(bad)
        found, expected = results(call, inputs, "triton"), results(call, inputs, "torch")
        for key, theirs in expected.items():
            torch.testing.assert_close(
                found[key], theirs, rtol=1e-9, atol=1e-12, equal_nan=True, msg=lambda m, k=key, n=name: f"{n} {k}: {m}"
            )


def test_a_rank_without_any_row_of_the_vocabulary():
    from gridtron.core.kernels.cross_entropy import ELSEWHERE, gradient, statistics

    local = torch.full((5,), ELSEWHERE)
    found, expected = (statistics(torch.randn(5, 0), local, backend=backend) for backend in ("triton", "torch"))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    numbers = torch.ones(5)
    assert gradient(found.kept, numbers, numbers, numbers, local, torch.float32, backend="triton").shape == (5, 0)


@pytest.mark.case(3)
@pytest.mark.parametrize("inplace", [False, True])
def test_no_target_no_loss_and_no_gradient(inplace):
    from gridtron.parallel.linear_loss import vocab_parallel_linear_cross_entropy
    from gridtron.parallel.loss import vocab_parallel_cross_entropy

    target = torch.full((4,), -100)
    for bad in (float("inf"), float("-inf"), float("nan")):
        logits = torch.full((4, 7), bad).requires_grad_()
        losses = vocab_parallel_cross_entropy(logits * 1, target, inplace=inplace, backend="triton")
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert torch.equal(losses, torch.zeros(4)) and torch.equal(gradient, torch.zeros(4, 7))
        x, weight = torch.full((4, 3), bad).requires_grad_(), torch.randn(7, 3, requires_grad=True)
        losses = vocab_parallel_linear_cross_entropy(x, weight, target, backend="triton")
        (gradient,) = torch.autograd.grad(losses.sum(), x)
        assert torch.equal(losses, torch.zeros(4)) and torch.equal(gradient, torch.zeros(4, 3))


def test_a_row_of_minus_infinity_has_no_loss():
    from gridtron.parallel.loss import vocab_parallel_cross_entropy

    logits = torch.randn(3, 7)
    logits[1] = float("-inf")
    for backend in ("triton", "torch"):
        losses = vocab_parallel_cross_entropy(logits, torch.tensor([0, 1, 2]), backend=backend)
        assert losses.isnan().tolist() == [False, True, False]


def test_rows_that_are_too_long_for_a_program_are_torchs():
    from gridtron.core.kernels.backend import MAXIMUM_COLUMNS
    from gridtron.core.kernels.rms_norm import rms_norm

    x, weight = torch.randn(2, MAXIMUM_COLUMNS + 1), torch.randn(MAXIMUM_COLUMNS + 1)
    assert torch.equal(rms_norm(x, weight, 1e-5, "triton"), rms_norm(x, weight, 1e-5, "torch"))
    x, weight = x[:, 1:], weight[1:]
    assert torch.allclose(rms_norm(x, weight, 1e-5, "triton"), rms_norm(x, weight, 1e-5, "torch"), atol=1e-5)


def test_logits_that_were_overwritten_are_not_used_again():
    from gridtron.parallel.loss import vocab_parallel_cross_entropy

    logits = torch.randn(3, 7, requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits * 1, torch.tensor([0, 1, 2]), inplace=True, backend="triton")
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_sizes_by_rule_are_powers_of_two():
    from gridtron.core.kernels.triton_kernels import bias_gelu, cross_entropy, launch

    for rule in (launch.row_rule, bias_gelu._backward_rule, cross_entropy._statistics_rule):
        for columns in (0, 1, 7, 96, 1000, 4096, 16384, 128256):
            assert all(size > 0 and size & (size - 1) == 0 for size in rule(columns).values()), (rule, columns)
