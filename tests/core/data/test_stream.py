"""Streams: a step's samples do not depend on the grid, each comes once an epoch, a position is all there is."""

import itertools

import numpy as np
import pytest
import torch

from gridtron.core.data.batch import IGNORE_INDEX
from gridtron.core.data.stream import EvaluationStream, TrainingStream


class Numbered:
    """Sample i holds the number i in each of its five places."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def samples(self, indices):
        tokens = np.repeat(np.asarray(indices)[:, None], 5, axis=1)
        return tokens, np.zeros_like(tokens)


def training(count=10, batch=2, micro=1, rank=0, size=1, seed=3):
    return TrainingStream(Numbered(count), seed, batch, micro, rank, size)


def read(stream, position):
    return [row for batch in stream.microbatches(position) for row in batch.tokens[:, 0].tolist()]


def walk(stream, steps, position=0):
    positions = []
    for _ in range(steps):
        positions.append(position)
        position = stream.next_position(position)
    return positions


@pytest.mark.parametrize(("micro", "size"), [(1, 1), (2, 1), (12, 1), (1, 2), (3, 2), (6, 2), (1, 3), (2, 3), (3, 4)])
def test_samples_do_not_depend_on_the_grid(micro, size):
    whole = training(50, 12, 12)
    for position in walk(whole, 9):
        parts = [training(50, 12, micro, rank, size) for rank in range(size)]
        assert [row for part in parts for row in read(part, position)] == read(whole, position)
        indices = [batch.sample_indices for part in parts for batch in part.microbatches(position)]
        assert torch.cat(indices).tolist() == list(range(position, position + 12))
        assert all(len(part.microbatches(position)) == 12 // size // micro for part in parts)


@pytest.mark.case(33)
@pytest.mark.parametrize(("batch", "micro", "size"), [(4, 2, 1), (4, 2, 2), (4, 1, 2), (6, 3, 1), (5, 1, 1)])
def test_every_sample_comes_once_an_epoch(batch, micro, size):
    """Accumulation included: steps are not counted in microbatches anywhere."""
    count = 60
    streams = [training(count, batch, micro, rank, size) for rank in range(size)]
    for epoch in range(3):
        positions = walk(streams[0], count // batch, epoch * count)
        seen = [row for position in positions for stream in streams for row in read(stream, position)]
        assert sorted(seen) == list(range(count))


@pytest.mark.case(33)
@pytest.mark.parametrize("size", [1, 2])
def test_resume_goes_on_with_the_next_samples(size):
    unbroken = training(60, 8, 2, 0, size)
    positions = walk(unbroken, 6)
    saved = walk(training(60, 8, 2, 0, size), 4)[-1]  # the position saved after three steps
    resumed = training(60, 8, 2, 0, size)
    again = [read(resumed, position) for position in walk(resumed, 3, saved)]
    assert again == [read(unbroken, position) for position in positions[3:]]


@pytest.mark.case(34)
@pytest.mark.parametrize("size", [1, 2])
def test_resume_in_the_second_epoch_has_its_order(size):
    unbroken = training(10, 2, 1, 0, size)
    positions = walk(unbroken, 15)
    saved = walk(unbroken, 8)[-1]
    assert saved == positions[7] and saved // 10 == 1
    resumed = training(10, 2, 1, 0, size)
    assert [read(resumed, at) for at in walk(resumed, 8, saved)] == [read(unbroken, at) for at in positions[7:]]


def test_epochs_and_seeds_differ():
    orders = [tuple(training(30, 30, 30, seed=seed).sample_ids(epoch * 30)) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 6


@pytest.mark.case(10)
@pytest.mark.parametrize("count", range(1, 26))
def test_last_partial_batch_is_dropped(count):
    batch = 4
    streams = [training(count, batch, 2, rank, 2) for rank in (0, 1)]
    per_epoch = count // batch
    for position in walk(streams[0], 12):
        assert [len(stream.microbatches(position)) for stream in streams] == [1, 1]
        if per_epoch:
            assert position % count + batch <= count
    if per_epoch:
        assert walk(streams[0], per_epoch + 1)[-1] == count


@pytest.mark.parametrize(("count", "batch"), list(itertools.product((1, 3, 4, 5, 9, 12, 13), (1, 3, 4, 12))))
def test_position_of_step_is_the_walk(count, batch):
    stream = training(count, batch, 1)
    assert [stream.position_of_step(step) for step in range(20)] == walk(stream, 20)


def test_fewer_samples_than_a_batch_wrap():
    stream = training(3, 8, 8)
    ids = np.concatenate([stream.sample_ids(position) for position in walk(stream, 3)])
    assert [sorted(ids[start : start + 3].tolist()) for start in range(0, 24, 3)] == [[0, 1, 2]] * 8


def test_position_left_by_another_batch_size_is_read():
    """A run that goes on with another batch (checkpoint.allow_changes) may stand close to the end of an epoch."""
    stream = training(10, 4, 4)
    ids = stream.sample_ids(8)
    assert len(ids) == 4 and stream.next_position(8) == 12
    assert ids[:2].tolist() == training(10, 2, 2).sample_ids(8).tolist()


@pytest.mark.parametrize(("batch", "micro", "size"), [(5, 2, 1), (4, 2, 3), (1, 2, 1)])
def test_batch_that_does_not_divide(batch, micro, size):
    with pytest.raises(ValueError, match=f"global_batch_size={batch} is not a multiple of micro_batch_size={micro}"):
        training(50, batch, micro, 0, size)


def test_targets_and_weights():
    class Ramp(Numbered):
        def samples(self, indices):
            tokens = np.asarray(indices)[:, None] * 10 + np.arange(5)
            return tokens, np.tile([0, 0, 1, 1, 2], (len(indices), 1))

    (batch,) = TrainingStream(Ramp(4), 0, 2, 2).microbatches(0)
    assert batch.tokens.shape == (2, 4) and torch.equal(batch.targets, batch.tokens + 1)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2 and batch.document_ids.tolist() == [[0, 0, 1, 1]] * 2
    assert batch.loss_weights.dtype == torch.float32 and batch.loss_weights.sum() == 8 and batch.count == 8


@pytest.mark.case(10)
@pytest.mark.parametrize("count", range(1, 20))
@pytest.mark.parametrize(("micro", "size"), [(1, 1), (2, 1), (2, 2), (1, 4), (1, 2)])
def test_evaluation_pads_the_last_batch(count, micro, size):
    streams = [EvaluationStream(Numbered(count), 4, micro, 3, rank, size) for rank in range(size)]
    per_rank = [list(stream) for stream in streams]
    assert {len(batches) for batches in per_rank} == {len(streams[0])}
    assert {batch.tokens.shape for batches in per_rank for batch in batches} == {(micro, 4)}
    counted = []
    for batch in itertools.chain(*per_rank):
        real = batch.targets[:, 0] != IGNORE_INDEX
        assert torch.equal(batch.loss_weights, real[:, None].expand(-1, 4).float())
        assert (batch.targets[~real] == IGNORE_INDEX).all()
        counted += batch.tokens[real, 0].tolist()
    assert sorted(counted) == list(range(min(count, 12)))


def test_nothing_to_read():
    with pytest.raises(ValueError, match="held_out"):
        EvaluationStream(Numbered(0), 2, 1, 1)
    with pytest.raises(ValueError, match="no sample"):
        TrainingStream(Numbered(0), 0, 2, 1)
