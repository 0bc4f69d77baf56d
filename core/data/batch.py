"""One microbatch, with all that any part of the step needs to know of its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float, Int

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORE_INDEX = -100
"""Target of a token that takes no part in the loss."""


@dataclass(frozen=True)
class Batch:
    """One microbatch of one data rank.

    Args:
        tokens: inputs.
        targets: the token to predict at each place, IGNORE_INDEX where none is.
        loss_weights: 1.0 where the target counts, 0.0 where it is ignored.
        positions: place of each token in its document.
        document_ids: number of the document inside the sample, from 0.
        sample_indices: global index of each sample in the run's stream: the counter of its dropout masks.
    """

    tokens: Int["Tensor", "batch sequence"]
    targets: Int["Tensor", "batch sequence"]
    loss_weights: Float["Tensor", "batch sequence"]
    positions: Int["Tensor", "batch sequence"]
    document_ids: Int["Tensor", "batch sequence"]
    sample_indices: Int["Tensor", "batch"]

    @staticmethod
    def of(tokens: Tensor, targets: Tensor, sample_indices: Tensor | None = None) -> Batch:
        """A batch of one document a sample, its weights taken from the ignored targets."""
        import torch

        batch, sequence = tokens.shape
        if sample_indices is None:
            sample_indices = torch.arange(batch)
        return Batch(
            tokens,
            targets,
            (targets != IGNORE_INDEX).to(torch.float32),
            torch.arange(sequence).expand(batch, sequence),
            torch.zeros_like(tokens),
            sample_indices,
        )

    @property
    def count(self) -> int:
        """Number of tokens that count in the loss."""
        return int((self.targets != IGNORE_INDEX).sum())

    def to(self, device: torch.device) -> Batch:
        return Batch(
            *(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__),
        )
