"""ZeRO by hand: a user's own module, torch's AdamW over optimizer_parameters(), against one plain process."""

import pytest
import torch
from parity import worst_error
from ranks import run_ranks
from torch import nn

from gridtron.core import Grid
from gridtron.parallel import DataParallel, full_state_dict, load_full_state_dict

DTYPE = torch.float64
MICROBATCHES = 3
BOUND = 1e-10


class Own(nn.Module):
    """Odd sizes, four dimensions and none, containers, a module under two names, branches that few inputs take."""

    def __init__(self):
        super().__init__()
        self.image = nn.Conv2d(1, 3, (2, 2))
        self.flat = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 7)))
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first_name = nn.Linear(7, 5, bias=False)
        self.second_name = self.first_name
        self.back = nn.Linear(5, 7)
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(3, 3)
        self.register_buffer("shift", torch.arange(7) / 10)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 7), requires_grad=False)

    def forward(self, x, branch):
        h = self.flat(self.image(x)) + self.shift
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * self.scale
        h = self.back(torch.tanh(self.first_name(h)))
        h = self.second_name(h * self.frozen)
        return self.back(h) if not branch else self.sometimes(self.back(h))


class Twice(nn.Module):
    """One module three times in a container, a weight shared by two modules."""

    def __init__(self):
        super().__init__()
        again = nn.Linear(7, 7)
        self.encode = nn.Linear(9, 7, bias=False)
        self.body = nn.Sequential(again, nn.Tanh(), again, nn.Tanh(), again)
        self.decode = nn.Linear(7, 9, bias=False)
        self.decode.weight = nn.Parameter(torch.randn(9, 7))
        self.out = nn.Linear(9, 7, bias=False)
        self.out.weight = self.encode.weight

    def forward(self, x, branch):
        h = self.body(self.encode(x.flatten(1)))
        return self.out(torch.tanh(self.decode(h)))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(9, 1)

    def forward(self, x, branch):
        return self.only(x.flatten(1))


KINDS = {"own": Own, "twice": Twice, "plain": Plain}


def make(kind, seed):
    torch.manual_seed(seed)
    return KINDS[kind]().to(DTYPE)


def samples(step, world_size):
    """Of every rank, its microbatches; only one rank ever takes the branch, not in its last microbatch, not in the
    second step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(world_size, MICROBATCHES, 2, 1, 3, 3, generator=generator, dtype=DTYPE)
    branch = [[rank == 0 and number == 0 and step != 1 for number in range(MICROBATCHES)] for rank in range(world_size)]
    return [list(zip(*pair, strict=True)) for pair in zip(x, branch, strict=True)]


def loss_of(model, sample):
    x, branch = sample
    return model(x, branch).square().sum() / 7


def optimizer_of(parameters):
    # A bias may have no gradient but rounding, which AdamW would divide by a smaller eps.
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3, eps=1e-6)


def forget(how, model, optimizer, step):
    if how == "model":
        model.zero_grad()
    elif how == "optimizer":
        optimizer.zero_grad()
    elif how == "to zero":
        optimizer.zero_grad(set_to_none=False)
    elif how == "seldom" and step == 2:
        optimizer.zero_grad()


def train_alone(kind, how, world_size, steps):
    model = make(kind, 0)
    optimizer = optimizer_of(model.parameters())
    gradients = []
    for step in range(steps):
        for own in samples(step, world_size):
            for sample in own:
                loss_of(model, sample).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        forget(how, model, optimizer, step)
    with torch.no_grad():
        evaluation = float(loss_of(model, samples(9, 1)[0][0]))
    return gradients, {name: p.detach().clone() for name, p in model.named_parameters()}, evaluation


def train_by_hand(kind, how, zero, options, steps):
    with Grid.create(data=-1) as grid:
        module = make(kind, grid.rank)  # each rank draws other weights: the wrapper makes them one
        model = DataParallel(module, grid.data, zero=zero, **options)
        optimizer = optimizer_of(model.optimizer_parameters())
        never = {name: t for name, t in full_state_dict(model).items() if name.startswith("never")}
        gradients = []
        for step in range(steps):
            own = samples(step, grid.data.size)[grid.data.rank]
            for sample in own[:-1]:
                with model.no_reduce():
                    loss_of(model, sample).backward()
            loss_of(model, own[-1]).backward()
            model.finish_step()
            gradients.append(full_state_dict(model, of="gradients"))
            optimizer.step()
            forget(how, model, optimizer, step)
        with torch.no_grad():
            evaluation = float(loss_of(model, samples(9, 1)[0][0]))
        parameters = full_state_dict(model)
        assert all(torch.equal(parameters[name], tensor) for name, tensor in never.items()), "weights that none uses"
        return gradients, parameters, evaluation


REFERENCES = {}


def check(kind, how, zero, world_size, steps=4, **options):
    key = kind, how, world_size, steps
    if key not in REFERENCES:
        REFERENCES[key] = train_alone(*key)
    expected = REFERENCES[key]
    for gradients, parameters, evaluation in run_ranks(train_by_hand, world_size, kind, how, zero, options, steps):
        for step, (found, wanted) in enumerate(zip(gradients, expected[0], strict=True)):
            error, name = worst_error(found, wanted)
            assert error < BOUND, f"gradient of {name} in step {step} differs by {error:.2e}"
        error, name = worst_error(parameters, expected[1])
        assert error < BOUND, f"{name} differs by {error:.2e}"
        assert evaluation == pytest.approx(expected[2], rel=BOUND)


@pytest.mark.sample(4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "how", ["model", "to zero", *(pytest.param(how, marks=pytest.mark.slow) for how in ("optimizer", "seldom"))]
)
def test_a_users_module(zero, how):
    """Whatever is done with gradients between steps, a step holds what autograd's would."""
    check("own", how, zero, 2, bucket_bytes=300)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["twice", "plain"])
def test_modules_and_weights_that_are_used_twice(zero, kind):
    check(kind, "model", zero, 3, steps=3)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("zero", "options"),
    [
        (0, {"reduce": "each"}),
        (1, {"reduce": "each", "bucket_bytes": 1}),
        (2, {"reduce": "last", "shard_size": 2}),
        (3, {"reduce": "last"}),
        (3, {"shard_size": 2}),
        (3, {"shard_size": 1}),
    ],
    ids=str,
)
def test_other_ways_to_reduce(zero, options):
    check("own", "optimizer", zero, 4, steps=3, **options)


def load_by_hand(zero):
    with Grid.create(data=-1) as grid:
        model = DataParallel(make("own", grid.rank), grid.data, zero=zero)
        optimizer = optimizer_of(model.optimizer_parameters())
        own = samples(0, grid.data.size)[grid.data.rank]
        found = []
        for seed in (4, 5, 6):
            if seed == 5:  # in the middle of a run: after a step, before any forward pass
                loss_of(model, own[0]).backward()
                model.finish_step()
                optimizer.step()
                optimizer.zero_grad()
            if seed == 6:  # after a forward pass without a backward
                loss_of(model, own[0])
            state = {name: p.detach().clone() for name, p in make("own", seed).named_parameters()}
            load_full_state_dict(model, state)
            assert all(torch.equal(tensor, state[name]) for name, tensor in full_state_dict(model).items())
            with torch.no_grad():
                found.append(float(loss_of(model, samples(9, 1)[0][0])))
            # After an evaluation, too, these are the parameters.
            assert all(torch.equal(tensor, state[name]) for name, tensor in full_state_dict(model).items())
        # An optimizer that begins anew goes on from the loaded weights.
        model.zero_grad()
        optimizer = optimizer_of(model.optimizer_parameters())
        loss_of(model, own[0]).backward()
        gradients = full_state_dict(model, of="gradients")
        optimizer.step()
        return found, gradients, full_state_dict(model)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_loaded_weights_are_those_that_train(zero):
    expected = []
    for seed in (4, 5, 6):
        model = make("own", seed)
        with torch.no_grad():
            expected.append(float(loss_of(model, samples(9, 1)[0][0])))
    optimizer = optimizer_of(model.parameters())
    for own in samples(0, 2):
        loss_of(model, own[0]).backward()
    optimizer.step()
    for found, gradients, parameters in run_ranks(load_by_hand, 2, zero):
        assert found == pytest.approx(expected, rel=BOUND)
        assert worst_error(gradients, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})[0] < BOUND
        assert worst_error(parameters, {n: p.detach() for n, p in model.named_parameters()})[0] < BOUND
