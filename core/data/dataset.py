"""Samples of one length cut from a stream of tokens, and its two parts: for training and held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gridtron.core.data.config import DataConfig
from gridtron.core.data.prepare import PreparedData
from gridtron.core.data.sources import DataError
from gridtron.core.data.token_file import TokenFile, open_token_file


@dataclass(frozen=True)
class TokenDataset:
    """Sample i is tokens [i S, i S + S] of a part of a token file: S inputs, and the same shifted by one as targets.

    Args:
        file: the token file.
        sequence_length: S.
        start, stop: the part, as indices of tokens.
        vocab_size: every id must be below it.
        described: the data's name in messages.
    """

    file: TokenFile
    sequence_length: int
    start: int
    stop: int
    vocab_size: int
    described: str = "data"

    def __len__(self) -> int:
        return max(0, (self.stop - self.start - 1) // self.sequence_length)

    def samples(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens (n, S + 1) and the number of each token's document inside its sample (n, S + 1), from 0.

        Raises:
            DataError: an id outside the vocabulary.
        """
        begins = self.start + np.asarray(indices, dtype=np.int64) * self.sequence_length
        width = self.sequence_length + 1
        tokens = np.stack([np.asarray(self.file.tokens[begin : begin + width], dtype=np.int64) for begin in begins])
        self._check_ids(tokens)
        places = begins[:, None] + np.arange(width)
        documents = np.searchsorted(self.file.document_starts, places, side="right")
        return tokens, documents - documents[:, :1]

    def check_start(self, count: int = 1 << 22) -> None:
        """Looks for ids outside the vocabulary among the first ``count``, before a run starts.

        Raises:
            DataError: there is one. The rest of a file is checked as it is read.
        """
        self._check_ids(self.file.tokens[self.start : min(self.stop, self.start + count)])

    def _check_ids(self, tokens: NDArray[np.integer]) -> None:
        if not tokens.size:
            return
        lowest, highest = int(tokens.min()), int(tokens.max())
        if highest >= self.vocab_size or lowest < 0:
            wrong = highest if highest >= self.vocab_size else lowest
            raise DataError(
                f"{self.described}: token id {wrong} is outside the vocabulary of {self.vocab_size}; set "
                "data.tokenizer to the one it was prepared with, or model.vocab_size"
            )


@dataclass(frozen=True)
class DataParts:
    """The two parts of a run's data; ``held_out`` may hold no sample."""

    training: TokenDataset
    held_out: TokenDataset


def open_parts(
    prepared: PreparedData, config: DataConfig, sequence_length: int, vocab_size: int, needs_held_out: bool = False
) -> DataParts:
    """Opens prepared data and parts it: the last ``config.held_out`` of the tokens are for evaluation.

    Args:
        prepared: from ``prepare_data``.
        config: of the data.
        sequence_length: tokens a sample.
        vocab_size: of the model.
        needs_held_out: whether evaluation will run.

    Raises:
        DataError: fewer tokens than one sample in a part that is needed; says what to change.
    """
    file = open_token_file(prepared.prefix)
    edge = len(file) - int(len(file) * config.held_out)
    training = TokenDataset(file, sequence_length, 0, edge, vocab_size, prepared.described)
    held_out = TokenDataset(file, sequence_length, edge, len(file), vocab_size, prepared.described)
    if not len(training):
        raise DataError(
            f"{prepared.described}: {edge:,} tokens for training are fewer than one sample of train.sequence_length="
            f"{sequence_length} and its last target ({sequence_length + 1}); {_shorter(edge)}"
        )
    if needs_held_out and not len(held_out):
        needed = min((sequence_length + 2) / len(file), 0.5)
        raise DataError(
            f"{prepared.described}: data.held_out={config.held_out} keeps {len(file) - edge:,} tokens, fewer than one "
            f"sample ({sequence_length + 1}); set data.held_out={needed:.2g} or more, or evaluation.every=0"
        )
    return DataParts(training, held_out)


def _shorter(tokens: int) -> str:
    return f"set train.sequence_length={tokens - 1} or less, or give more text" if tokens > 2 else "give more text"
