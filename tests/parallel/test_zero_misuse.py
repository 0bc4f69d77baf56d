"""ZeRO by hand where a loop or a module is not what one would write: the same result, or an error that says why."""

import pytest
import torch
from parity import worst_error
from ranks import run_ranks
from torch import nn

from gridtron.core import Grid
from gridtron.parallel import DataParallel, clip_gradients, full_state_dict

WORLD = 2


class Tied(nn.Module):
    """nanoGPT's layout: the embedding is an item of a ModuleDict, and the head outside of it has its weight."""

    def __init__(self):
        super().__init__()
        layers = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)) for _ in range(2))
        self.parts = nn.ModuleDict({"embedding": nn.Embedding(11, 6), "layers": layers})
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.parts["embedding"].weight
        self.empty = nn.ParameterList([nn.Parameter(torch.empty(0, 3))])

    def forward(self, tokens):
        x = self.parts["embedding"](tokens)
        for layer in self.parts["layers"]:
            x = layer(x)
            x += 0.1  # in place, on what a layer gave
        return self.head(x)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)

    def forward(self, tokens):
        return self.table(tokens)


KINDS = {"tied": Tied, "sparse": Sparse}


def make(kind):
    torch.manual_seed(0)
    model = KINDS[kind]().double()
    if kind == "tied":  # not contiguous
        model.parts["layers"][0][1].weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64).t())
    return model


def tokens_of(step):
    return torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    return model(tokens).square().sum() / 20


def alone(kind, steps, limit=None):
    model = make(kind)
    norms = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05) if kind != "sparse" else None
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        loss_of(model, tokens_of(step)).backward()
        if limit is not None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))
            for gradient in gradients:
                gradient.mul_(min(1, limit / norms[-1]))
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model), norms


def by_hand(kind, zero, steps, how, limit=None):
    with Grid.create(data=-1) as grid:
        model = DataParallel(make(kind), grid.data, zero=zero, bucket_bytes=200)
        norms = []
        chosen = torch.optim.SGD if kind == "sparse" else torch.optim.AdamW
        optimizer = chosen(model.optimizer_parameters(), lr=0.05)
        for step in range(steps):
            # "idle": rank 1 has no sample; "uneven": rank 0 has three microbatches, rank 1 has one.
            cut = {"even": [2, 2], "idle": [4, 0], "uneven": [3, 1]}[how.split("-")[0]]
            own = tokens_of(step).split(cut)[grid.rank]
            *first, last = own.split(1) if len(own) else [None]
            for sample in first:
                with model.no_reduce():
                    loss_of(model, sample).backward()
            if last is not None:
                loss_of(model if "inner" not in how else model.module, last).backward()
            model.finish_step()
            if limit is not None:
                norms.append(clip_gradients(model, limit))
            optimizer.step()
            model.zero_grad(set_to_none="zeros" not in how)
        return full_state_dict(model), norms


def check(kind, zero, how, steps=3, limit=None):
    expected, expected_norms = alone(kind, steps, limit)
    for state, norms in run_ranks(by_hand, WORLD, kind, zero, steps, how, limit):
        assert worst_error(state, expected)[0] < 1e-10
        assert norms == pytest.approx(expected_norms, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_tied_items_and_operations_in_place(zero):
    check("tied", zero, "even")


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("how", ["idle", "idle-zeros", "uneven", "even-inner"])
def test_ranks_that_do_less(zero, how):
    check("tied", zero, how)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sparse_gradients(zero):
    check("sparse", zero, "even")


@pytest.mark.case(28)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_clipping_by_the_whole_norm(zero):
    check("tied", zero, "even", limit=0.01)


def misuse(zero):
    found = []
    with Grid.create(data=-1) as grid:
        tokens = tokens_of(0)
        model = DataParallel(make("tied"), grid.data, zero=zero, bucket_bytes=200)
        loss_of(model, tokens).backward()
        try:
            model.zero_grad()
        except RuntimeError as error:
            found.append(str(error))
        model.finish_step()
        model.zero_grad()
        model.float()
        try:
            model(tokens)
        except RuntimeError as error:
            found.append(str(error))
        model.finish_step()
    return found


@pytest.mark.parametrize("zero", [1, 2])
def test_what_cannot_be_right_is_told(zero):
    for found in run_ranks(misuse, WORLD, zero):
        assert len(found) == 2
        assert found[0].startswith("zero_grad() before finish_step()")
        assert "was replaced after DataParallel was made" in found[1]


def test_a_wrapper_in_a_wrapper_is_refused():
    with pytest.raises(ValueError, match="in a DataParallel already"):
        DataParallel(DataParallel(nn.Linear(2, 2)))
