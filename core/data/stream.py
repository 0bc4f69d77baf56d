"""Which samples each data rank reads at each step: pure functions of one integer, the position in the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gridtron.core.data.batch import IGNORE_INDEX, Batch
from gridtron.core.data.order import permute
from gridtron.core.random import random_key


class SampleSource(Protocol):
    """What a stream reads: samples by index. ``TokenDataset`` is one; a plugin's own may be another."""

    def __len__(self) -> int: ...

    def samples(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens (n, S + 1) and document numbers (n, S + 1), both int64."""
        ...


def _share(global_batch_size: int, micro_batch_size: int, data_rank: int, data_size: int) -> list[NDArray[np.int64]]:
    """Slots of the global batch that one data rank reads, microbatch by microbatch: contiguous shares.

    Raises:
        ValueError: a batch that does not divide, with the nearest that does.
    """
    assert 0 <= data_rank < data_size, (data_rank, data_size)
    unit = micro_batch_size * data_size
    if global_batch_size % unit:
        lower = global_batch_size // unit * unit
        nearest = f"{lower} or {lower + unit}" if lower else f"{unit}"
        raise ValueError(
            f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size={micro_batch_size} x "
            f"data={data_size}; nearest: {nearest}"
        )
    share = global_batch_size // data_size
    slots = np.arange(data_rank * share, (data_rank + 1) * share, dtype=np.int64)
    return list(slots.reshape(-1, micro_batch_size))


class TrainingStream:
    """The training data of one data rank, in an order that is a function of (seed, epoch).

    The position is epoch x n + offset, n the number of samples. Every epoch reads each sample once, but for what does
    not fill a last global batch, which is dropped: the next epoch begins instead. Where n is smaller than a global
    batch, batches run over the ends of epochs and hold samples more than once.

    Slot j of the global batch is read by data rank j // (global_batch_size / data_size), whatever the other axes of the
    grid: the samples of a step do not depend on the grid.

    Args:
        source: the samples.
        seed: of the order.
        global_batch_size: samples a step, over all data ranks.
        micro_batch_size: samples a microbatch of one data rank.
        data_rank, data_size: this rank's place on the data axis.
    """

    def __init__(
        self, source: SampleSource, seed: int, global_batch_size: int, micro_batch_size: int, data_rank: int = 0,
        data_size: int = 1,
    ):  # fmt: skip
        if not len(source):
            raise ValueError("the training data holds no sample; give more text or a shorter sequence_length")
        self._source = source
        self._seed = seed
        self._size = len(source)
        self._batch = global_batch_size
        self._shares = _share(global_batch_size, micro_batch_size, data_rank, data_size)

    def sample_ids(self, position: int) -> NDArray[np.int64]:
        """Samples of the whole global batch at ``position``, slot by slot: (global_batch_size,)."""
        return self._samples_at(position + np.arange(self._batch, dtype=np.int64))

    def _samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, offsets = np.divmod(positions, self._size)
        samples = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            key = random_key(self._seed, "order of data", f"epoch {epoch}")
            here = epochs == epoch
            samples[here] = permute(offsets[here], self._size, key)
        return samples

    def microbatches(self, position: int) -> list[Batch]:
        """This rank's microbatches of the step whose data begins at ``position``."""
        return [
            _batch(self._source, self._samples_at(position + slots), position + slots, None) for slots in self._shares
        ]

    def next_position(self, position: int) -> int:
        """Where the next step reads, after one at ``position``."""
        following = position + self._batch
        if self._size < self._batch:
            return following
        offset = following % self._size
        return following if offset + self._batch <= self._size else following - offset + self._size

    def position_of_step(self, step: int) -> int:
        """The position after ``step`` steps: where step ``step + 1`` reads; 0 for a new run."""
        if self._size < self._batch:
            return step * self._batch
        epoch, batch = divmod(step, self._size // self._batch)
        return epoch * self._size + batch * self._batch


class EvaluationStream:
    """The first held-out samples, in order: the same on every grid, the same number of microbatches on every rank.

    The last global batch is filled up with samples that take no part in the loss.

    Args:
        source: the samples.
        global_batch_size, micro_batch_size, data_rank, data_size: as of ``TrainingStream``.
        steps: global batches at most.
    """

    def __init__(
        self, source: SampleSource, global_batch_size: int, micro_batch_size: int, steps: int, data_rank: int = 0,
        data_size: int = 1,
    ):  # fmt: skip
        if not len(source):
            raise ValueError("the held-out data holds no sample; set data.held_out higher")
        self._source = source
        self._count = min(len(source), steps * global_batch_size)
        self._batch = global_batch_size
        self._shares = _share(global_batch_size, micro_batch_size, data_rank, data_size)

    def __len__(self) -> int:
        """Microbatches of this rank."""
        return -(-self._count // self._batch) * len(self._shares)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self._count, self._batch):
            for slots in self._shares:
                indices = start + slots
                # A pad reads a sample that exists; its targets are then ignored.
                yield _batch(self._source, np.minimum(indices, self._count - 1), indices, indices >= self._count)


def _batch(
    source: SampleSource, samples: NDArray[np.int64], places: NDArray[np.int64], padded: NDArray[np.bool_] | None
) -> Batch:
    tokens, documents = source.samples(samples)
    targets = tokens[:, 1:].copy()
    if padded is not None:
        targets[padded] = IGNORE_INDEX
    rows, width = targets.shape
    return Batch(
        tokens=_tensor(tokens[:, :-1]),
        targets=_tensor(targets),
        loss_weights=_tensor(targets != IGNORE_INDEX).to(torch.float32),
        positions=torch.arange(width).expand(rows, width),
        document_ids=_tensor(documents[:, :-1]),
        sample_indices=_tensor(places),
    )


def _tensor(array: NDArray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
