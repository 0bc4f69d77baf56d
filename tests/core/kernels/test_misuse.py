"""What the operations refuse: tensors that do not fit, implementations that are not there, a second derivative."""

import functools

import pytest
import torch
from interpreted import interpreted

from gridtron.core.kernels.bias_gelu import bias_gelu
from gridtron.core.kernels.config import KernelsConfig
from gridtron.core.kernels.dropout_add import counted_dropout, dropout_add
from gridtron.core.kernels.layer_norm import layer_norm
from gridtron.core.kernels.rms_norm import rms_norm
from gridtron.core.kernels.rope import rope
from gridtron.core.kernels.scaled_masked_softmax import scaled_masked_softmax
from gridtron.core.kernels.swiglu import swiglu
from gridtron.core.random import draw_key
from gridtron.models import GPT, GPTConfig
from gridtron.parallel import Dropout, vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

BACKENDS = ["torch", "triton"]


def ones(*shape, dtype=torch.float64):
    return torch.ones(shape, dtype=dtype)


PLACE = (0.5, 7, torch.arange(3), 0, [0, 0], [0, 1])
HEADS, TABLE = ones(1, 2, 4, 6), ones(4, 3)
REFUSED = {
    "a short gain": lambda backend: rms_norm(ones(3, 5), ones(4), 1e-5, backend),
    "one gain for all": lambda backend: rms_norm(ones(3, 5), ones(1), 1e-5, backend),
    "whole numbers": lambda backend: rms_norm(ones(3, 5).long(), ones(5), 1e-5, backend),
    "one number alone": lambda backend: rms_norm(ones(), ones(), 1e-5, backend),
    "a short bias of a norm": lambda backend: layer_norm(ones(3, 5), ones(5), ones(4), 1e-5, backend),
    "halves of other widths": lambda backend: swiglu(ones(3, 5), ones(3, 4), backend),
    "halves that broadcast": lambda backend: swiglu(ones(1, 5), ones(3, 5), backend),
    "a short bias": lambda backend: bias_gelu(ones(3, 5), ones(4), "none", backend),
    "short tables": lambda backend: rope(HEADS, TABLE[:3], TABLE[:3], backend),
    "wide tables": lambda backend: rope(HEADS, ones(4, 4), ones(4, 4), backend),
    "unlike tables": lambda backend: rope(HEADS, TABLE, TABLE[:, :2], backend),
    "scores of three dimensions": lambda backend: scaled_masked_softmax(ones(2, 4, 4), 1.0, backend=backend),
    "a mask to add": lambda backend: scaled_masked_softmax(ones(1, 1, 4, 4), 1.0, mask=ones(4, 4), backend=backend),
    "a mask of other keys": lambda backend: scaled_masked_softmax(
        ones(1, 1, 4, 4), 1.0, mask=torch.ones(4, 3, dtype=torch.bool), backend=backend
    ),
    "another residual": lambda backend: dropout_add(ones(3, 5), ones(3, 4), *PLACE, backend=backend),
    "few samples": lambda backend: dropout_add(
        ones(3, 5), ones(3, 5), 0.5, 7, torch.arange(2), 0, [0, 0], [0, 1], backend
    ),
    "no such dimension": lambda backend: counted_dropout(
        ones(3, 5), 0.5, 7, torch.arange(3), 5, [0, 0], [0, 1], backend
    ),
    "everything dropped": lambda backend: counted_dropout(ones(3, 5), 1.0, *PLACE[1:], backend=backend),
    "an unknown implementation": lambda backend: rms_norm(ones(3, 5), ones(5), 1e-5, backend + "s"),
    "targets that are no ids": lambda backend: vocab_parallel_cross_entropy(ones(3, 5), ones(3), backend=backend),
    "a leaf overwritten": lambda backend: vocab_parallel_cross_entropy(
        ones(3, 5).requires_grad_(), torch.arange(3), inplace=True, backend=backend
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name, backend):
    with interpreted(), pytest.raises(ValueError, match=r"given|p=1|has auto|inplace=True"):
        REFUSED[name](backend)


TWICE = {
    "rms_norm": lambda x, backend: rms_norm(x, ones(5), 1e-5, backend),
    "swiglu": lambda x, backend: swiglu(x, x.detach(), backend),
    "rope": lambda x, backend: rope(x.view(1, 1, 3, 5)[..., :4], ones(3, 2), ones(3, 2), backend),
    "softmax": lambda x, backend: scaled_masked_softmax(x.view(1, 1, 3, 5), 1.0, False, backend=backend),
    "dropout_add": lambda x, backend: dropout_add(x, x.detach(), *PLACE, backend=backend),
    "loss": lambda x, backend: vocab_parallel_cross_entropy(x, torch.arange(3), backend=backend),
    "linear loss": lambda x, backend: vocab_parallel_linear_cross_entropy(
        x, ones(7, 5), torch.arange(3), backend=backend
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TWICE)
def test_a_second_derivative_is_an_error(name, backend):
    """Never a wrong number: what is made by hand is differentiable once."""
    z = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5).requires_grad_()
    with interpreted(), pytest.raises(RuntimeError, match="differentiable once"):
        (first,) = torch.autograd.grad(TWICE[name](z.sin(), backend).square().sum(), z, create_graph=True)
        torch.autograd.grad(first.square().sum(), z)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_samples_of_any_integers(backend):
    x, residual = ones(3, 8), ones(3, 8)
    with interpreted():
        for key in (2**64 - 3, draw_key()):
            same = [
                dropout_add(x, residual, 0.5, number, samples, 0, [0, 0], [0, 1], backend)
                for number in (key, key - 2**64 if key >= 2**63 else key)
                for samples in (torch.arange(3), torch.arange(3, dtype=torch.int32))
            ]
            assert all(torch.equal(same[0], other) for other in same)


def test_one_row_of_bias_and_gelu():
    x, bias = (torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_() for _ in range(2))
    bias_gelu(x, bias, "none", "torch").sum().backward()
    expected = torch.autograd.grad(torch.nn.functional.gelu(x + bias).sum(), (x, bias))
    assert torch.equal(x.grad, expected[0]) and torch.equal(bias.grad, expected[1])


@pytest.mark.parametrize(
    "options", [{"backend": "foo"}, {"rms_norm": "foo"}, {"rope": "apex"}, {"chunked_loss": "no"}], ids=str
)
def test_a_configuration_made_by_hand(options):
    with pytest.raises(ValueError, match="it is"):
        KernelsConfig(**options)


def test_apex_that_is_not_there():
    config = GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=7, max_position_embeddings=4)
    model = GPT(config, seed=0, kernels=KernelsConfig(backend="apex"))
    with pytest.raises(ValueError, match="apex is not installed"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="dropout_add has"):
        Dropout(0.1, backend="foo")
    with pytest.raises(ValueError, match="three dimensions"):
        Dropout(0.1)(torch.ones(3, 4))


@pytest.mark.parametrize("linear", [False, True])
def test_losses_become_one_graph(linear):
    x, weight = torch.randn(6, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    target = torch.tensor([0, 3, -100, 10, 5, 5])
    if linear:
        loss = functools.partial(vocab_parallel_linear_cross_entropy, x, weight, vocabulary=11)
    else:
        loss = functools.partial(vocab_parallel_cross_entropy, x @ weight.t(), vocabulary=11)
    compiled = torch.compile(lambda target: loss(target=target), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(target), loss(target=target))
