"""Input gradients first, weight gradients later: equal to plain autograd, whatever the module does."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gridtron.parallel import TensorParallelLinear, activation_checkpoint
from gridtron.parallel.gradient_door import Deferral
from gridtron.parallel.pipeline.split_backward import backward_input

WIDTH = 5


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, WIDTH, bias=False))

    def forward(self, x):
        return self.layers(x)


class TwiceOnOnePath(nn.Module):
    """(x @ w) @ w: both products lead to the same leaf."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return torch.tanh(x @ self.w) @ self.w


class OneLayerTwice(nn.Module):
    """The same layer, bias and all, twice on one path: what it adds was broadcast over the rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class TiedInside(nn.Module):
    """One weight in two layers, one of them transposed, and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = self.second(torch.sin(self.first(x))) * self.scale
        return y @ self.first.weight.t() + self.first.weight.sum()


class MadeOfTwo(nn.Module):
    """The weight is itself a product, and the same transposed view serves twice."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 2))
        self.b = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        w = (self.a @ self.b).t()
        return torch.tanh(x @ w) @ w + x


class Mixed(nn.Module):
    """A layer that can wait beside one that cannot; the same weight in both kinds of product."""

    def __init__(self):
        super().__init__()
        self.up = TensorParallelLinear(WIDTH, 6)
        self.down = TensorParallelLinear(6, WIDTH, partition="row", bias=True)
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        return self.plain(y) + (y @ self.up.weight.t())[..., :WIDTH]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x):
        return self.convolution(x.unsqueeze(1)).tanh().sum(1)


class Hooked(nn.Module):
    """Hooks on activations: one that turns the gradient round where a product begins, one that only looks."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: -2 * gradient)
        y = self.b(h)
        if y.requires_grad:
            y.register_hook(lambda gradient: None)
        return y


class SomeFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), TensorParallelLinear(WIDTH, WIDTH))
        self.layers[0].weight.requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)

    def forward(self, x):
        return self.layers(x)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.used(x)


class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.before = inner, nn.Linear(WIDTH, WIDTH)
        self.forwards = 0

    def counted(self, x, extra):
        self.forwards += 1
        return self.inner(x * extra["scale"][0])

    def forward(self, x):
        extra = {"scale": (torch.tensor(1.5, dtype=x.dtype), "no tensor")}
        return activation_checkpoint(self.counted, torch.tanh(self.before(x)), extra)


KINDS = [Plain, TwiceOnOnePath, OneLayerTwice, TiedInside, MadeOfTwo, Mixed, Convolution, Hooked, SomeFrozen, Unused]
KINDS += [lambda: Recomputed(Plain()), lambda: Recomputed(Mixed()), lambda: Recomputed(TiedInside())]
NAMES = ["plain", "twice", "layer-twice", "tied", "made", "mixed", "convolution", "hooked", "frozen", "unused"]
NAMES += ["recomputed-plain", "recomputed-mixed", "recomputed-tied"]


def watched(module):
    deferral = Deferral()
    deferral.watch(module.parameters())
    return deferral


def run_split(module, deferral, x, gradient):
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    with deferral.splitting(True):
        edge = get_gradient_edge(module(leaf))
    leaves = [leaf] if leaf.requires_grad else []
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found, work = backward_input([edge], [gradient], leaves, parameters, deferral)
    return found, work


@pytest.mark.case(25)
@pytest.mark.parametrize("needs_input", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_the_two_halves_are_the_whole(make, needs_input):
    torch.manual_seed(3)
    module = make().double()
    dense = copy.deepcopy(module)
    deferral = watched(module)
    for _ in range(2):  # gradients accumulate over microbatches
        x, gradient = torch.randn(2, 4, WIDTH, dtype=torch.double)
        x.requires_grad_(needs_input)
        found, work = run_split(module, deferral, x, gradient)
        leaf = x.detach().clone().requires_grad_(needs_input)
        dense(leaf).backward(gradient)
        if needs_input:
            torch.testing.assert_close(found[0], leaf.grad, rtol=1e-12, atol=1e-12)
        for finish in work:
            finish()
    for (name, ours), theirs in zip(module.named_parameters(), dense.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
        else:
            assert ours.grad is not None and not ours.grad.requires_grad, name
            torch.testing.assert_close(
                ours.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("make", "late"),
    [
        (Plain, {"layers.0.weight", "layers.0.bias", "layers.3.weight"}),
        (TwiceOnOnePath, {"w"}),
        (lambda: TensorParallelLinear(WIDTH, 3), {"weight", "bias"}),
        (lambda: Recomputed(Plain()), {"inner.layers.0.weight", "inner.layers.3.weight", "before.weight"}),
    ],
    ids=["plain", "twice", "tensor-parallel", "recomputed"],
)
def test_weights_wait_for_the_second_half(make, late):
    module = make().double()
    deferral = watched(module)
    x = torch.randn(3, WIDTH, dtype=torch.double, requires_grad=True)
    with torch.no_grad():
        gradient = torch.randn_like(module(x))
    _, work = run_split(module, deferral, x, gradient)
    waiting = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert late <= waiting
    for finish in work:
        finish()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("inner", [Plain, Mixed, lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))])
def test_a_recomputed_layer_runs_twice_and_draws_the_same_numbers(inner):
    torch.manual_seed(5)
    module = Recomputed(inner()).double()
    dense = copy.deepcopy(module)
    deferral = watched(module)
    x, gradient = torch.randn(2, 4, WIDTH, dtype=torch.double)
    torch.manual_seed(7)
    found, work = run_split(module, deferral, x.requires_grad_(), gradient)
    assert module.forwards == 2
    for finish in work:
        finish()
    assert module.forwards == 2
    torch.manual_seed(7)
    dense(x).backward(gradient)
    torch.testing.assert_close(found[0], x.grad)
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in dense.parameters()])


def test_between_the_halves_only_operands_are_held():
    """The activations between deferring layers are free once the first half is over."""
    module = nn.Sequential(TensorParallelLinear(WIDTH, WIDTH), nn.Tanh(), TensorParallelLinear(WIDTH, WIDTH))
    deferral = watched(module)
    saved = weakref.WeakSet()

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            saved.add(self)

    x = torch.randn(3, WIDTH, requires_grad=True)
    with deferral.splitting(True), torch.autograd.graph.saved_tensors_hooks(Saved, lambda item: item.tensor):
        edge = get_gradient_edge(module(x))
    assert len(saved) == 5  # operands of the two products, and what tanh gave
    _, work = backward_input([edge], [torch.randn(3, WIDTH)], [x], list(module.parameters()), deferral)
    assert len(saved) == 0 and len(work) == 2


def assert_split_is_whole(module, x, gradient):
    """Input and weight gradients of one split pass against plain autograd."""
    dense, leaf = copy.deepcopy(module), x.clone().requires_grad_()
    found, work = run_split(module, watched(module), x.clone().requires_grad_(), gradient)
    for finish in work:
        finish()
    dense(leaf).backward(gradient)
    torch.testing.assert_close(found[0], leaf.grad)
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in dense.parameters()])


class Captures(nn.Module):
    def __init__(self, given):
        super().__init__()
        self.pre, self.inner, self.given = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), given

    def gated(self, y, gate):
        return self.inner(y * gate)

    def forward(self, x):
        gate = torch.sigmoid(self.pre(x))
        if self.given:
            return activation_checkpoint(self.gated, x, gate)
        return activation_checkpoint(lambda y: self.gated(y, gate), x)


def test_recomputation_of_what_was_computed_outside_is_refused_not_lost():
    x, gradient = torch.randn(2, 4, WIDTH, dtype=torch.double)
    module = Captures(given=False).double()
    with pytest.raises(ValueError, match=r"gated|lambda.*computed outside of it.*pass it as an argument"):
        run_split(module, watched(module), x.requires_grad_(), gradient)
    assert_split_is_whole(Captures(given=True).double(), x.detach(), gradient)


def test_modules_in_a_list_are_recomputed_as_well():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            layers = [self.m]
            return activation_checkpoint(lambda y: layers[0](torch.tanh(y)), x)

    assert_split_is_whole(Listed().double(), *torch.randn(2, 4, WIDTH, dtype=torch.double))


def test_work_of_a_pass_that_failed_is_forgotten():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    layer = TensorParallelLinear(WIDTH, WIDTH)
    deferral = watched(layer)
    x = torch.randn(2, WIDTH, requires_grad=True)
    with deferral.splitting(True):
        edge = get_gradient_edge(layer(Fails.apply(x)))
    with pytest.raises(ZeroDivisionError):
        backward_input([edge], [torch.ones(2, WIDTH)], [x], list(layer.parameters()), deferral)
    _, work = run_split(layer, deferral, x, torch.ones(2, WIDTH))
    assert len(work) == 1
