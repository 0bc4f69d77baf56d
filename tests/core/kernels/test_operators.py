"""The operators of the Triton kernels: schemas, fakes, and no break in a compiled graph on any backend."""

import pytest
import torch

from gridtron.core.kernels.config import AVAILABLE

from .calls import CALLS, compare, inputs_of, results

pytestmark = pytest.mark.usefixtures("interpreter")
# The optimizer is no function of tensors; losses check targets on a CPU, which a graph cannot hold.
TRACED = [
    name for name, call in CALLS.items() if call.operation not in ("adamw", "cross_entropy", "linear_cross_entropy")
]


def _arguments():
    x, weight, bias = torch.randn(5, 3, 7), torch.randn(7), torch.randn(7)
    rows, numbers, local = torch.randn(5, 11), torch.rand(5), torch.tensor([0, 3, -1, -2, 10])
    heads = torch.randn(6, 2, 3, 8).permute(1, 2, 0, 3)
    angles = torch.randn(6, 4)
    scores, mask = torch.randn(2, 3, 5, 5), torch.rand(2, 1, 5, 5) < 0.3
    scale = torch.rand(5, 3, 1)
    place = (0.3, 5, torch.arange(3), 1, [0, 0, 0], [7, 0, 1])
    return {
        "rms_norm": [(x, weight, 1e-5)],
        "rms_norm_backward": [(x, x, weight, scale, True, True), (x, x, weight, scale, False, True)],
        "layer_norm": [(x, weight, bias, 1e-5), (x, weight, None, 1e-5)],
        "layer_norm_backward": [
            (x, x, weight, scale, scale, True, True, True),
            (x, x, weight, scale, scale, True, False, False),
        ],
        "rope": [(heads, angles, angles, False), (heads[..., ::2], angles[:, :2], angles[:, :2], True)],
        "swiglu": [(x, x), (x.transpose(0, 1), x.transpose(0, 1))],
        "swiglu_backward": [(x, x, x)],
        "bias_gelu": [(x, bias, True), (x, None, False)],
        "bias_gelu_backward": [(x, x, bias, True, True), (x, x, None, False, False)],
        "scaled_masked_softmax": [
            (scores, 0.3, True, None, True),
            (scores.transpose(0, 1), 0.3, False, None, False),
            (scores, 0.3, True, mask, True),
        ],
        "scaled_masked_softmax_backward": [(scores, scores.softmax(-1), 0.3)],
        "dropout_add": [(x, x, *place), (x, None, *place)],
        "cross_entropy_statistics": [(rows, local), (rows.bfloat16(), local)],
        "cross_entropy_gradient": [(rows, numbers, numbers, numbers, local)],
        "cross_entropy_gradient_": [(rows.clone(), numbers, numbers, numbers, local)],
    }


OPERATORS = _arguments()


@pytest.mark.parametrize("name", OPERATORS)
def test_schema_and_fake(name):
    from gridtron.core.kernels import (  # noqa: F401  # noqa: F401
        bias_gelu,
        cross_entropy,
        dropout_add,
        layer_norm,
        rms_norm,
        rope,
        scaled_masked_softmax,
        swiglu,
    )

    for arguments in OPERATORS[name]:
        torch.library.opcheck(
            getattr(torch.ops.gridtron, name).default, arguments, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("name", TRACED)
def test_no_break_in_a_graph(name, backend):
    call = CALLS[name]
    inputs = inputs_of(call, call.shapes[0], torch.float64)
    expected = results(call, inputs, backend)
    torch._dynamo.reset()
    traced = torch.compile(call.run, fullgraph=True, backend="aot_eager")
    found = results(type(call)(**{**vars(call), "run": traced}), inputs, backend)
    compare(found, expected, 1e-12)


def test_no_break_in_the_passes_of_the_loss():
    from gridtron.core.kernels.cross_entropy import gradient, statistics

    def passes(logits, local, weight, backend):
        found = statistics(logits, local, False, backend)
        return gradient(found.kept, found.maximum, weight / found.total, weight, local, logits.dtype, False, backend)

    arguments = (torch.randn(5, 11, dtype=torch.float64), torch.tensor([0, 3, -1, -2, 10]), torch.rand(5).double())
    for backend in ("triton", "torch"):
        traced = torch.compile(passes, fullgraph=True, backend="aot_eager")
        assert torch.allclose(traced(*arguments, backend), passes(*arguments, "torch"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CALLS)
def test_unknown_backends_are_refused(name):
    if CALLS[name].operation == "adamw":
        return
    inputs = inputs_of(CALLS[name], CALLS[name].shapes[0], torch.float32)
    names = ", ".join(("auto", *AVAILABLE[CALLS[name].operation]))
    with pytest.raises(ValueError, match=f"backend='cuda': .* has {names}"):
        CALLS[name].run(inputs, "cuda")
