"""The weights in a checkpoint, for another run, another format: rectangles of them, or one whole at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.checkpoint.stored import Stored

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PARAMETER = "parameters/"


class CheckpointWeights:
    """The weights of a checkpoint, of which rectangles are read, with the checksums of what is touched.

    Where a run kept main weights wider than its parameters, those are read: a parameter is their rounded copy.

    Args:
        stored: the checkpoint.
    """

    def __init__(self, stored: Stored):
        self.stored = stored
        tensors = stored.manifest.tensors
        self.shapes = {
            name.removeprefix(_PARAMETER): entry.shape for name, entry in tensors.items() if name.startswith(_PARAMETER)
        }
        if not self.shapes:
            raise CheckpointError(f"{stored.path} holds no parameters; give the checkpoint of a run")

    def _named(self, name: str) -> str:
        main = f"optimizer/{name}/main"
        return main if main in self.stored.manifest.tensors else _PARAMETER + name

    def dtype(self, name: str) -> torch.dtype:
        """Of the parameter itself."""
        return self.stored.dtype(_PARAMETER + name)

    def whole(self, name: str, dtype: torch.dtype) -> Tensor:
        """One whole weight in ``dtype``: from the main weight only where that is wider than the parameter."""
        own = self.dtype(name)
        wider = dtype.itemsize > own.itemsize
        return self.stored.tensor(self._named(name) if wider else _PARAMETER + name).to(dtype)

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A rectangle of a weight."""
        import torch

        named = self._named(name)
        found = torch.empty(sizes, dtype=self.stored.dtype(named))
        for piece in self.stored.manifest.tensors[named].pieces:
            lows = [max(a, b) for a, b in zip(offsets, piece.offsets, strict=True)]
            stops = [
                min(a + size, b + held)
                for a, size, b, held in zip(offsets, sizes, piece.offsets, piece.sizes, strict=True)
            ]
            if all(low < stop for low, stop in zip(lows, stops, strict=True)):
                target = found
                for dim, (low, stop) in enumerate(zip(lows, stops, strict=True)):
                    target = target.narrow(dim, low - offsets[dim], stop - low)
                within = [low - offset for low, offset in zip(lows, piece.offsets, strict=True)]
                with self.stored.open(piece.file) as file:
                    self.stored.copy_box(file, named, piece, within, target)
        return found
