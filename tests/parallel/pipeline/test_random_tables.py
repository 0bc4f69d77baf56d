"""The prover on random tables against real runs over gloo: what it lets through ends, what it refuses does not."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from torch import nn

from gridtron.core import Grid
from gridtron.parallel.pipeline import Action, PipelineRunner, Schedule, lower

WIDTH = 3


def random_table(seed):
    """A table that can run, with a few neighbours swapped; every action once, its own order kept."""
    generator = random.Random(seed)
    ranks = generator.choice([2, 3])
    stages = generator.randint(ranks, 2 * ranks)
    placement = [*range(ranks), *(generator.randrange(ranks) for _ in range(stages - ranks))]
    generator.shuffle(placement)
    microbatches = generator.randint(1, 3)
    halves = {(s, m): generator.choice(["B", "IW"]) for s in range(stages) for m in range(microbatches)}
    needs = {}
    for (stage, number), kinds in halves.items():
        forward, first = Action("F", stage, number), Action(kinds[0], stage, number)
        needs[forward] = [Action("F", stage - 1, number)] if stage else []
        after = [Action(halves[stage + 1, number][0], stage + 1, number)] if stage + 1 < stages else []
        needs[first] = [forward, *after]
        if kinds == "IW":
            needs[Action("W", stage, number)] = [first]
    rows = [[] for _ in range(ranks)]
    done = set()
    while len(done) < len(needs):
        ready = sorted(action for action in needs if action not in done and all(n in done for n in needs[action]))
        action = generator.choice(ready)
        done.add(action)
        rows[placement[action.stage]].append(action)
    for _ in range(generator.randint(0, 10)):
        row = generator.choice(rows)
        place = generator.randrange(len(row) - 1)
        one, other = row[place : place + 2]
        if (one.stage, one.microbatch) != (other.stage, other.microbatch):
            row[place : place + 2] = other, one
    return Schedule("random", microbatches, tuple(placement), tuple(map(tuple, rows)))


def is_proven(schedule):
    try:
        lower(schedule.validate()).validate()
    except ValueError:
        return False
    return True


def follow(schedule):
    """The table as it stands, each action when its inputs are here; no lowering and no proof."""
    me, placement = dist.get_rank(), schedule.placement
    here = set()
    pending = []

    def key(kind, stage, number):
        return 1 + (kind == "gradient") + 2 * (stage * schedule.microbatches + number)

    def take(kind, stage, number):
        if placement[stage] == me:
            if (kind, stage, number) not in here:
                raise RuntimeError(f"{kind} of stage {stage} comes later on this rank: it would wait for itself")
        else:
            dist.recv(torch.zeros(1), placement[stage], tag=key(kind, stage, number))

    def give(kind, stage, number, to):
        here.add((kind, stage, number))
        if 0 <= to < schedule.num_stages and placement[to] != me:
            pending.append(dist.isend(torch.ones(1), placement[to], tag=key(kind, stage, number)))

    for action in schedule.actions[me]:
        stage, number = action.stage, action.microbatch
        if action.kind == "F":
            if stage:
                take("activation", stage - 1, number)
            give("activation", stage, number, stage + 1)
        elif action.kind in "BI":
            if stage + 1 < schedule.num_stages:
                take("gradient", stage + 1, number)
            give("gradient", stage, number, stage - 1)
    for work in pending:
        work.wait()
    return True


def train(schedule):
    grid = Grid.create(pipeline=-1)
    torch.manual_seed(3)
    whole = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in schedule.placement]
    dense = copy.deepcopy(whole)
    mine = {stage: whole[stage] for stage in schedule.stages(grid.rank)}
    inputs = torch.randn(schedule.microbatches, 2, WIDTH, dtype=torch.double)
    runner = PipelineRunner(mine, schedule, grid.pipeline, loss=lambda y, target: (y - target).square())
    for _ in range(2):
        runner.step(list(inputs), list(inputs))
        nn.Sequential(*dense)(inputs).sub(inputs).square().sum().backward()
    for stage, module in mine.items():
        for ours, theirs in zip(module.parameters(), dense[stage].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-11)
    return True


def agree(seed):
    schedule = random_table(seed)
    if is_proven(schedule):
        assert all(run_ranks(train, schedule.ranks, schedule, timeout=20))
        return True
    with pytest.raises(RankError):
        run_ranks(follow, schedule.ranks, schedule, timeout=2)
    return False


def test_the_tables_are_of_both_kinds():
    verdicts = [is_proven(random_table(seed)) for seed in range(200)]
    assert 50 < sum(verdicts) < 150


@pytest.mark.parametrize("seed", range(10))
def test_the_verdict_is_what_happens(seed):
    agree(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 80))
def test_the_verdict_is_what_happens_on_more(seed):
    agree(seed)
