"""Weights of a Hugging Face folder as those of this project's decoder, read in slices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from gridtron.core.errors import JobError
from gridtron.models.config import GPTConfig
from gridtron.models.huggingface.families import BUFFERS, Family, Row
from gridtron.models.huggingface.folder import CONFIG, Folder
from gridtron.models.huggingface.settings import Translation, read_translation
from gridtron.parallel.weights import agree, load_weights

if TYPE_CHECKING:
    from gridtron.core.grid import Grid

_DTYPES = ("F64", "F32", "F16", "BF16")
_LISTED = 10
_HEAD = "head.weight"


def parameter_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Of every parameter of the whole model, in the order of its modules; no memory is asked for."""
    from gridtron.models.gpt import GPT

    model = GPT(config, seed=0, device="meta")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


class HuggingFaceWeights:
    """A folder's weights under this project's names.

    Args:
        path: the folder.
        translation: of its config.json; read here where it is not given.

    Raises:
        ValueError: names that are missing or left over and shapes that differ, all of them listed.
    """

    def __init__(self, path: str | Path, translation: Translation | None = None):
        path = Path(path).expanduser()
        self.translation = translation or read_translation(path)
        self.folder = Folder(path)
        self.family: Family = self.translation.family
        config = self.translation.config
        names = self.folder.names()
        if config.num_layers > len(names):
            raise ValueError(f"{path / CONFIG} names {config.num_layers} layers, and there are {len(names)} tensors")
        bare = not any(name.startswith(self.family.prefix) for name in names)
        self._cut = self.family.prefix if bare else ""
        self.shapes = parameter_shapes(config)
        self.head_size = config.head_size
        problems, self._tied_copy = self._check(config)
        if problems:
            more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
            raise ValueError(
                "\n  ".join([f"{path}: the weights are not those of its {CONFIG}:", *problems[:_LISTED], *more])
            )

    def _place(self, name: str) -> tuple[Row, str]:
        found = self.family.row(name)
        assert found is not None, f"{self.family.name} has no row for {name}"
        return found[0], found[1].removeprefix(self._cut)

    def _check(self, config: GPTConfig) -> tuple[list[str], str | None]:
        """What does not fit, and the name of a head that is stored although it is the embedding."""
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in self.shapes.items():
            row, theirs = self._place(name)
            expected[theirs] = row.layout.shape(shape)
        names = set(self.folder.names())
        tied = self._place(_HEAD)[1] if config.tie_embeddings else None
        problems = [f"missing: {name}" for name in expected if name not in names]
        problems += [
            f"unexpected: {name}"
            for name in sorted(names)
            if name not in expected and name != tied and not BUFFERS.fullmatch(name)
        ]
        for name, shape in expected.items():
            if name not in names:
                continue
            if (found := self.folder.shape(name)) != shape:
                problems.append(f"{name} has shape {list(found)} and should have {list(shape)}")
            if (code := self.folder.dtype(name)) not in _DTYPES:
                problems.append(f"{name} is of {code}; weights are read from {', '.join(_DTYPES)}")
        return problems, tied if tied in names else None

    def dtype(self, name: str) -> str:
        """safetensors' code of one of our parameters."""
        return self.folder.dtype(self._place(name)[1])

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A rectangle of one of our weights, read from the slices of theirs that hold it."""
        row, theirs = self._place(name)
        found = self._slices(row, theirs, self.shapes[name][0], offsets, sizes)
        if self._tied_copy is not None and name == "embedding.weight":
            copy = self._slices(self._place(_HEAD)[0], self._tied_copy, self.shapes[name][0], offsets, sizes)
            if not copy.equal(found):
                raise ValueError(
                    f"{self.folder.path}: {self._tied_copy} differs from {theirs}, and tie_word_embeddings says that "
                    "they are one; set tie_word_embeddings to false in config.json, or take the tensor out"
                )
        return found

    def _slices(self, row: Row, theirs: str, rows: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        import torch

        rest = [slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True)]
        parts = []
        for low, high in row.layout.outputs(offsets[0], offsets[0] + sizes[0], rows, self.head_size):
            wanted = [slice(low, high), *rest]
            if row.layout.transposed:
                parts.append(self.folder.slice(theirs, *wanted[::-1]).t())
            else:
                parts.append(self.folder.slice(theirs, *wanted))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def load_huggingface(model: nn.Module, path: str | Path, grid: Grid | None = None) -> None:
    """Puts the weights of a Hugging Face folder into ``model``, each rank its own rows, slice by slice.

    Every rank of ``grid`` must call it. Nothing is changed where anything does not fit.

    Args:
        model: a GPT of the folder's shape (:func:`read_config`), or one wrapped by DataParallel.
        path: the folder: config.json and safetensors files.
        grid: the model's grid.

    Raises:
        ValueError: what does not fit, all of it listed, on every rank alike.
    """
    try:
        weights = agree(lambda: HuggingFaceWeights(path), grid)
    except JobError as fault:
        raise ValueError(str(fault)) from None
    load_weights(model, weights, grid, str(path))
