"""DataParallel by hand: sums, buckets, what has no gradient, misuse; and torch's own wrappers around our layers."""

import gc
import weakref

import pytest
import torch
from ranks import run_ranks
from torch import nn

from gridtron.core import Grid, Ledger
from gridtron.parallel import (
    DataParallel,
    TensorParallelLinear,
    accumulate_gradient,
    full_state_dict,
    sequence_parallel_region,
)


class Branches(nn.Module):
    """Odd sizes, a frozen parameter, a branch that only some inputs take, one that none takes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.last = nn.Linear(7, 1)

    def forward(self, x, extra):
        h = self.first(x) * self.frozen
        return self.last(self.sometimes(h) if extra else h)


def inputs():
    torch.manual_seed(9)
    return torch.randn(8, 3, 5, dtype=torch.float64), [True, False, False, True, False, False, False, False]


def check_by_hand(bucket_bytes):
    with Grid.create(data=-1) as grid:
        torch.manual_seed(grid.rank)  # each rank draws other weights: the wrapper makes them one
        model = DataParallel(Branches().double(), grid.data, bucket_bytes=bucket_bytes)
        x, extra = inputs()
        own = list(zip(x, extra, strict=True))[grid.data.rank :: grid.data.size]
        results = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for sample, branch in own[:-1]:
                with model.no_reduce():
                    (model(sample, branch).sum() / 8).backward()
            with Ledger(grid) as ledger:
                (model(own[-1][0], own[-1][1]).sum() / 8).backward()
                model.finish_step()
                model.finish_step()
            results.append(full_state_dict(model, of="gradients"))
            calls = ledger.calls("data", "all_reduce")
            optimizer.step()
            optimizer.zero_grad()
        return results, full_state_dict(model), calls


@pytest.mark.case(1)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_sums_over_ranks_and_microbatches(world_size, bucket_bytes):
    results = run_ranks(check_by_hand, world_size, bucket_bytes)
    torch.manual_seed(0)
    reference = Branches().double()
    x, extra = inputs()
    for step in range(3):
        reference.zero_grad()
        sum(reference(sample, branch).sum() / 8 for sample, branch in zip(x, extra, strict=True)).backward()
        expected = {name: p.grad.clone() for name, p in reference.named_parameters() if p.grad is not None}
        for gradients, _, _ in results:
            assert gradients[step].keys() == expected.keys(), "absent where there is none on any rank"
            for name, gradient in expected.items():
                assert torch.allclose(gradients[step][name], gradient, rtol=1e-12, atol=1e-12), name
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
    first = results[0][1]
    assert all(torch.equal(state[name], first[name]) for _, state, _ in results for name in first)
    assert {calls for *_, calls in results} == {{1: 8, 300: 4, 1 << 20: 1}[bucket_bytes]}


def check_rank_without_backward():
    with Grid.create(data=-1) as grid:
        torch.manual_seed(0)
        model = DataParallel(nn.Linear(3, 2).double(), grid.data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if step != 1 or grid.rank == 0:
                model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            model.finish_step()
            gradient = full_state_dict(model, of="gradients")["bias"]
            assert torch.equal(gradient, torch.full((2,), 2.0 if step != 1 else 1.0, dtype=torch.float64))
            optimizer.step()
            optimizer.zero_grad()


def test_a_rank_without_any_backward_takes_part():
    run_ranks(check_rank_without_backward, 2)


def check_misuse():
    with Grid.create(data=-1) as grid:
        model = DataParallel(nn.Linear(3, 2), grid.data)
        x = torch.ones(1, 3)
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="came after its bucket was reduced"):
            model(x).sum().backward()
        frozen = nn.Linear(3, 2)
        frozen.bias.requires_grad_(False)
        model = DataParallel(frozen, grid.data)
        frozen.bias.requires_grad_(True)
        with pytest.raises(RuntimeError, match="bias was frozen when DataParallel was made"):
            model(x)


def test_misuse_is_named():
    run_ranks(check_misuse, 2)


def check_gradients_between_steps(dtype, zeroing):
    """Whatever happens to .grad between two steps, the second holds what autograd would on the whole batch."""
    with Grid.create(data=-1) as grid:
        torch.manual_seed(0)
        net, plain = (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(dtype) for _ in range(2))
        plain.load_state_dict(net.state_dict())
        model = DataParallel(net, grid.data)
        plain.load_state_dict(net.state_dict())
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.25) for module in (net, plain)]
        for step in range(3):
            xs = [torch.full((1, 3), 0.5 + rank + step, dtype=dtype) for rank in range(grid.data.size)]
            model(xs[grid.rank]).sum().backward()
            model.finish_step()
            for x in xs:
                plain(x).sum().backward()
            for p, q in zip(net.parameters(), plain.parameters(), strict=True):
                assert p.grad is not None and p.grad.dtype == dtype
                assert torch.allclose(p.grad, q.grad, rtol=0.02 if dtype == torch.bfloat16 else 1e-12)
            before = net[0].weight.clone()
            for optimizer in optimizers:
                optimizer.step()
                if zeroing is not None:
                    optimizer.zero_grad(set_to_none=zeroing)
            assert not torch.equal(before, net[0].weight), "the optimizer takes .grad"
            plain.load_state_dict(net.state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("zeroing", [True, False, None])
def test_grad_is_what_an_optimizer_takes(world_size, dtype, zeroing):
    run_ranks(check_gradients_between_steps, world_size, dtype, zeroing)


def check_converted_after_wrapping():
    with Grid.create(data=-1) as grid:
        net = nn.Linear(3, 2).double()
        model = DataParallel(net, grid.data)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            model.to(dtype)
            model(torch.ones(1, 3, dtype=dtype)).sum().backward()
            model.finish_step()
            assert torch.equal(net.bias.grad, torch.full((2,), float(grid.data.size), dtype=dtype))
            model.zero_grad()


def check_widened_after_wrapping():
    with Grid.create(data=-1) as grid:
        model = DataParallel(nn.Linear(3, 2), grid.data).double()
        with pytest.raises(RuntimeError, match=r"became torch.float64 after .* accumulate in torch.float32; convert"):
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()


def test_widened_after_wrapping_is_refused():
    run_ranks(check_widened_after_wrapping, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_converted_after_wrapping(world_size):
    run_ranks(check_converted_after_wrapping, world_size)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        DataParallel(nn.Linear(2, 2), bucket_bytes=0)
    with pytest.raises(ValueError, match="zero=4: it is 0, 1, 2 or 3"):
        DataParallel(nn.Linear(2, 2), zero=4)
    with pytest.raises(ValueError, match="shard_size=2 cuts what zero=0 keeps whole"):
        DataParallel(nn.Linear(2, 2), shard_size=2)
    with pytest.raises(ValueError, match="must divide the 1 ranks of the axis axis; nearest: shard_size=1"):
        DataParallel(nn.Linear(2, 2), zero=1, shard_size=2)
    with pytest.raises(ValueError, match='it is "each" or "last"'):
        DataParallel(nn.Linear(2, 2), zero=1, reduce="never")


def check_wide_accumulation():
    with Grid.create(data=-1) as grid:
        torch.manual_seed(0)
        model = DataParallel(nn.Linear(4, 1, bias=False, dtype=torch.bfloat16), grid.data)
        x = torch.full((1, 4), 1 / 256, dtype=torch.bfloat16)
        with model.no_reduce():
            for _ in range(511):
                model(x).sum().backward()
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        model.finish_step()
        gradient = model.gradient(model.module.weight)
        assert gradient.dtype == torch.float32
        return float(gradient[0, 0]) / grid.data.size


@pytest.mark.parametrize("world_size", [1, 2])
def test_narrow_gradients_accumulate_wide(world_size):
    """In bfloat16 1 + 1/256 is 1: the small gradients would be lost."""
    assert run_ranks(check_wide_accumulation, world_size) == [1 + 511 / 256] * world_size


def check_sequence_region():
    with Grid.create(tensor=-1) as grid:
        torch.manual_seed(0)
        norm = sequence_parallel_region(nn.LayerNorm(6, dtype=torch.float64), grid.tensor)
        up = TensorParallelLinear(6, 9, grid.tensor, sequence_parallel=True, dtype=torch.float64)
        down = TensorParallelLinear(9, 6, grid.tensor, "row", sequence_parallel=True, dtype=torch.float64)
        module = nn.Sequential(norm, up, nn.GELU(), down)
        x = torch.randn(6, 2, 6, dtype=torch.float64).chunk(grid.tensor.size)[grid.tensor.rank]
        module(x).square().sum().backward()
        bare = full_state_dict(module, of="gradients")
        module.zero_grad()
        model = DataParallel(module)
        model(x).square().sum().backward()
        wrapped = full_state_dict(model, of="gradients")
        assert all(torch.allclose(bare[name], wrapped[name], rtol=1e-12, atol=1e-12) for name in wrapped)
        return wrapped


@pytest.mark.case(5)
def test_norms_by_hand_in_a_sequence_parallel_region():
    (expected,) = run_ranks(check_sequence_region, 1)
    for gradients in run_ranks(check_sequence_region, 3):
        for name, gradient in expected.items():
            assert torch.allclose(gradients[name], gradient, rtol=1e-11, atol=1e-11), name


def check_torch_ddp():
    from torch.nn.parallel import DistributedDataParallel

    with Grid.create(data=2, tensor=2) as grid:
        torch.manual_seed(0)
        layer = TensorParallelLinear(4, 6, grid.tensor, gather_output=True, dtype=torch.float64)
        model = DistributedDataParallel(layer, process_group=grid.data.group)
        x = torch.arange(4, dtype=torch.float64) + grid.data.rank
        model(x).sum().backward()
        return full_state_dict(model, of="gradients")


def test_our_layers_inside_torch_ddp():
    """The weight's gradient goes through autograd, so that anybody's hooks see it; DDP averages."""
    for gradients in run_ranks(check_torch_ddp, 4):
        assert torch.allclose(gradients["weight"], (torch.arange(4, dtype=torch.float64) + 0.5).expand(6, 4))


def test_the_door_without_a_wrapper():
    parameter = nn.Parameter(torch.zeros(2))
    accumulate_gradient(parameter, torch.ones(2))
    accumulate_gradient(parameter, torch.ones(2))
    assert torch.equal(parameter.grad, torch.full((2,), 2.0))


def test_a_wrapper_that_nobody_holds_is_let_go():
    """Its hooks on parameters do not keep it, nor the process groups that it holds; autograd goes on without it."""
    module = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    model = DataParallel(module)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).backward()
    model.finish_step()
    assert model.gradient(module.weight).dtype == torch.float32
    held = weakref.ref(model)
    module.weight.grad = None
    del model
    gc.collect()
    assert held() is None
    module(torch.ones(1, 2, dtype=torch.bfloat16)).backward()
    accumulate_gradient(module.weight, torch.ones(1, 2))
    assert torch.equal(module.weight.grad, torch.full((1, 2), 2.0, dtype=torch.bfloat16))
