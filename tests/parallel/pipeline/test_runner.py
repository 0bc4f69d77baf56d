"""Schedules on real ranks, in float64, against one process: losses, gradients, shapes that change, what is refused."""

import copy
import time

import pytest
import torch
from ranks import RankError, run_ranks
from torch import nn

from gridtron.core import Grid, Ledger
from gridtron.parallel import DataParallel, TensorParallelLinear, activation_checkpoint
from gridtron.parallel.pipeline import PipelineRunner, build_schedule
from gridtron.parallel.pipeline.build import FAMILIES

WIDTH = 6


class Stage(nn.Module):
    """Deferring and plain layers, a norm, a weight used twice, recomputation in odd stages."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.up = TensorParallelLinear(WIDTH, 7)
        self.down = TensorParallelLinear(7, WIDTH, partition="row")
        self.norm = nn.LayerNorm(WIDTH)
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.forwards = 0

    def inner(self, x):
        self.forwards += 1
        return x + self.plain(torch.tanh(self.plain(self.down(torch.tanh(self.up(self.norm(x)))))))

    def forward(self, x):
        return activation_checkpoint(self.inner, x) if self.number % 2 else self.inner(x)


def make_stages(count):
    torch.manual_seed(11)
    return [Stage(number).double() for number in range(count)]


def make_batches(microbatches, lengths=(4,), seed=5):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(lengths[number % len(lengths)], WIDTH) for number in range(microbatches)]
    return [tuple(torch.randn(shape, generator=generator, dtype=torch.double) for _ in range(2)) for shape in shapes]


def squared_error(output, target):
    return (output - target).square()


def dense_step(stages, batches, divisor):
    total = 0.0
    for x, target in batches:
        for stage in stages:
            x = stage(x)
        loss = squared_error(x, target).sum() / divisor
        loss.backward()
        total += loss.item()
    return total


def compare(mine, dense):
    for number, module in mine.items():
        for (name, ours), theirs in zip(module.named_parameters(), dense[number].parameters(), strict=True):
            assert ours.grad is not None, (number, name)
            torch.testing.assert_close(
                ours.grad, theirs.grad, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )


def check_family(name, chunks, microbatches):
    grid = Grid.create(pipeline=-1)
    for count in microbatches:
        schedule = build_schedule(name, grid.pipeline.size, count, chunks)
        whole = make_stages(schedule.num_stages)
        mine = {stage: whole[stage] for stage in schedule.stages(grid.pipeline.rank)}
        dense = copy.deepcopy(whole)
        runner = PipelineRunner(mine, schedule, grid.pipeline, loss=squared_error)
        batches = make_batches(count)
        inputs, targets = zip(*batches, strict=True)
        before = runner.evaluate(inputs[:2], targets[:2], divisor=3)
        total = runner.step(inputs, targets, divisor=count)
        again = runner.step(inputs, targets, divisor=count)  # gradients accumulate over calls
        after = runner.evaluate(inputs[:2], targets[:2], divisor=3)
        for module in mine.values():
            # Twice in evaluation; a recomputed layer twice a microbatch and call, any other once.
            assert module.forwards == 2 * len(inputs[:2]) + 2 * count * (1 + module.number % 2), schedule.name
        expected = [dense_step(dense, batches, count) for _ in range(2)]
        assert abs(total - expected[0]) < 1e-10 and abs(again - expected[1]) < 1e-10
        assert before == after
        compare(mine, dense)
    return True


@pytest.mark.sample(5)
@pytest.mark.case(2)
@pytest.mark.case(8)
@pytest.mark.parametrize("ranks", [1, *(pytest.param(few, marks=pytest.mark.slow) for few in (2, 3)), 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_is_plain_training(name, ranks):
    chunks = [None, 1, 3] if FAMILIES[name].any_chunks and ranks == 2 else [None]
    for count in chunks:
        assert all(run_ranks(check_family, ranks, name, count, range(1, 10) if ranks > 1 else (1, 4)))


def check_changing_shapes(name):
    grid = Grid.create(pipeline=-1)
    schedule = build_schedule(name, grid.pipeline.size, 4)
    whole = make_stages(schedule.num_stages)
    dense = copy.deepcopy(whole)
    mine = {stage: whole[stage] for stage in schedule.stages(grid.pipeline.rank)}
    runner = PipelineRunner(mine, schedule, grid.pipeline, loss=squared_error)
    for step, lengths in enumerate([(16,), (12,), (20,), (16, 3, 12), (16,), (0, 5)]):
        inputs, targets = zip(*make_batches(4, lengths, seed=step), strict=True)
        total = runner.step(inputs, targets)
        assert abs(total - dense_step(dense, list(zip(inputs, targets, strict=True)), 1)) < 1e-9
        counted = runner.evaluate(inputs[:3], targets[:3])
        assert torch.isfinite(counted)
    compare(mine, dense)
    return True


@pytest.mark.case(26)
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_shapes_may_change_within_a_step_and_between_steps(name):
    assert all(run_ranks(check_changing_shapes, 2, name))


class Several(nn.Module):
    """Gives several tensors: trained, untrained, of integers, passed on, unused by the next stage."""

    def __init__(self, last):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = last

    def forward(self, x, mask, kept=None, number=None):
        y = self.linear(x) * mask
        if self.last:
            return y if kept is None else y + kept
        return y, mask, x.detach() if kept is None else kept, torch.arange(3), y.square()[:0]


class LastOfSeveral(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, mask, kept, number, empty):
        assert number.tolist() == [0, 1, 2] and empty.shape[0] == 0
        return self.inner(x, mask, kept)


class Middle(LastOfSeveral):
    pass


def check_several():
    grid = Grid.create(pipeline=-1)
    torch.manual_seed(2)
    inner = [Several(last=number == 2).double() for number in range(3)]
    whole = [inner[0], Middle(inner[1]), LastOfSeveral(inner[2])]
    dense = copy.deepcopy(whole)
    schedule = build_schedule("1f1b", 3, 4)
    mine = {grid.rank: whole[grid.rank]}
    runner = PipelineRunner(mine, schedule, grid.pipeline, loss=squared_error)
    batches = make_batches(4)
    inputs = [(x, (x > 0).double()) for x, _ in batches]
    for _ in range(2):  # the second time over receives that were posted ahead
        total = runner.step(inputs, [target for _, target in batches])
    expected = 0.0
    for _ in range(2):
        expected = 0.0
        for given, (_, target) in zip(inputs, batches, strict=True):
            for module in dense:
                given = module(*given)
            loss = squared_error(given, target).sum()
            loss.backward()
            expected += loss.item()
    assert abs(total - expected) < 1e-9
    compare(mine, dict(enumerate(dense)))
    return True


def test_any_number_of_tensors_between_stages():
    assert all(run_ranks(check_several, 3))


def check_sleepy(name, microbatches):
    """A random pause before each action: no order that only luck gives."""
    grid = Grid.create(pipeline=-1)
    schedule = build_schedule(name, grid.pipeline.size, microbatches)
    whole = make_stages(schedule.num_stages)
    dense = copy.deepcopy(whole)
    mine = {stage: whole[stage] for stage in schedule.stages(grid.pipeline.rank)}
    generator = torch.Generator().manual_seed(grid.rank)

    def pause(stage, module, tensors, microbatch):
        time.sleep(0.01 * torch.rand(1, generator=generator).item())
        return module(*tensors)

    runner = PipelineRunner(mine, schedule, grid.pipeline, loss=squared_error, forward=pause)
    inputs, targets = zip(*make_batches(microbatches), strict=True)
    for _ in range(2):
        total = runner.step(inputs, targets)
        assert abs(total - dense_step(dense, list(zip(inputs, targets, strict=True)), 1)) < 1e-9
    compare(mine, dense)
    return True


@pytest.mark.case(24)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 3), (2, 4), (4, 4), (4, 5), (4, 8)])
def test_interleaved_does_not_depend_on_timing(ranks, microbatches):
    assert all(run_ranks(check_sleepy, ranks, "interleaved_1f1b", microbatches))


def check_refusals():
    grid = Grid.create(pipeline=-1)
    schedule = build_schedule("1f1b", 2, 3)
    stage = {grid.rank: make_stages(2)[grid.rank]}
    with pytest.raises(ValueError, match=r"stages=\[5\] on rank \d of the pipeline axis.*places \[\d\]"):
        PipelineRunner({5: stage[grid.rank]}, schedule, grid.pipeline)
    with pytest.raises(ValueError, match="ranks=3 and the pipeline axis has 2"):
        PipelineRunner(stage, build_schedule("1f1b", 3, 3), grid.pipeline)
    runner = PipelineRunner(stage, schedule, grid.pipeline, loss=squared_error)
    inputs, targets = zip(*make_batches(3), strict=True)
    with pytest.raises(ValueError, match="2 inputs and 3 targets for a schedule of microbatches=3"):
        runner.step(inputs[:2], targets)
    with pytest.raises(ValueError, match="3 inputs and 1 targets"):
        runner.evaluate(inputs, targets[:1])
    # Nothing was left half-way: the next call works.
    return runner.step(inputs if grid.rank == 0 else None, targets if grid.rank == 1 else None).item()


def test_what_is_refused_is_refused_on_every_rank():
    assert len(set(run_ranks(check_refusals, 2))) == 1


class Unsteady(nn.Module):
    """Another number of rows at each call, whatever comes in."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)[: self.calls]


def check_unsteady():
    grid = Grid.create(pipeline=-1)
    stage = Unsteady() if grid.rank == 0 else nn.Linear(WIDTH, WIDTH)
    runner = PipelineRunner({grid.rank: stage}, build_schedule("gpipe", 2, 1), grid.pipeline, loss=lambda y, t: y)
    for _ in range(2):
        runner.step([torch.ones(4, WIDTH)], [torch.ones(1)])


@pytest.mark.case(26)
def test_outputs_that_do_not_follow_from_the_inputs_are_named():
    with pytest.raises(RankError, match=r"gives \(2, 6\) float32 for microbatch 0, and gave \(1, 6\) float32"):
        run_ranks(check_unsteady, 2, timeout=30)


def check_ledger():
    grid = Grid.create(pipeline=-1)
    schedule = build_schedule("1f1b", 2, 3)
    runner = PipelineRunner({grid.rank: make_stages(2)[grid.rank]}, schedule, grid.pipeline, loss=squared_error)
    inputs, targets = zip(*make_batches(3), strict=True)
    runner.step(inputs, targets)
    with Ledger(grid) as ledger:
        runner.step(inputs, targets)
    return ledger.calls("pipeline", "send"), ledger.bytes("pipeline", "send")


def test_one_send_a_microbatch_and_direction():
    assert run_ranks(check_ledger, 2) == [(3, 3 * 4 * WIDTH * 8)] * 2


def check_door():
    """Behind DataParallel: two calls before one step, buckets summed once."""
    grid = Grid.create(pipeline=2, data=2)
    schedule = build_schedule("zb_h1", 2, 3)
    whole = make_stages(2)
    dense = copy.deepcopy(whole)
    model = DataParallel(whole[grid.pipeline.rank], grid.data)
    runner = PipelineRunner({grid.pipeline.rank: model.module}, schedule, grid.pipeline, loss=squared_error)
    batches = [make_batches(3, seed=seed) for seed in (1, 2)]
    inputs, targets = zip(*batches[grid.data.rank], strict=True)
    with model.no_reduce():
        runner.step(inputs, targets)
        runner.step(inputs, targets)
    model.finish_step()
    for _ in range(2):
        for half in batches:
            dense_step(dense, half, 1)
    compare({grid.pipeline.rank: model.module}, dense)
    return True


def test_deferred_gradients_pass_the_door():
    assert all(run_ranks(check_door, 4))


class InPlace(nn.Module):
    """Begins with an operation in place, as networks cut after a norm do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.layers(x)


def check_ordinary_modules(name):
    """In place first; frozen, trained and frozen again between steps; evaluation under no_grad between."""
    grid = Grid.create(pipeline=-1)
    schedule = build_schedule(name, grid.pipeline.size, 3)
    torch.manual_seed(4)
    whole = [nn.Linear(WIDTH, WIDTH), *(InPlace() for _ in range(schedule.num_stages - 1))]
    whole = [module.double() for module in whole]
    dense = copy.deepcopy(whole)
    mine = {stage: whole[stage] for stage in schedule.stages(grid.pipeline.rank)}
    runner = PipelineRunner(mine, schedule, grid.pipeline, loss=squared_error)
    inputs, targets = zip(*make_batches(3), strict=True)
    for trained in (False, True, True, False):
        for modules in (whole, dense):
            modules[0].requires_grad_(trained)
        with torch.no_grad():
            runner.evaluate(inputs, targets)
        total = runner.step(inputs, targets)
        assert abs(total - dense_step(dense, list(zip(inputs, targets, strict=True)), 1)) < 1e-9
    compare(mine, dense)
    return True


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_ordinary_modules(name):
    assert all(run_ranks(check_ordinary_modules, 2, name))


class Conjugate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def forward(self, x):
        return self.linear(x).conj()


def check_conjugate():
    grid = Grid.create(pipeline=-1)
    torch.manual_seed(4)
    whole = [Conjugate(), Conjugate()]
    dense = copy.deepcopy(whole)
    mine = {grid.rank: whole[grid.rank]}
    runner = PipelineRunner(mine, build_schedule("1f1b", 2, 2), grid.pipeline, loss=lambda y, t: y.abs().square())
    inputs = [torch.randn(3, WIDTH, dtype=torch.complex128) for _ in range(2)]
    runner.step(inputs, inputs)
    for x in inputs:
        dense[1](dense[0](x)).abs().square().sum().backward()
    compare(mine, dense)
    return True


def test_lazy_conjugates_travel():
    assert all(run_ranks(check_conjugate, 2))
