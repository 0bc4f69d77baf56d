"""Options of the data."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class DataConfig:
    path: str | None = option(
        None, "text, jsonl or .bin/.idx file, or a pattern; null: the source of the Python standard library", path=True
    )
    tokenizer: str = option("bytes", "bytes, or the path of a tokenizer.json", path=True)
    held_out: float = option(0.05, "share of the tokens kept for evaluation, from the end", minimum=0, below=1)
    directory: str | None = option(None, "where prepared data is kept; null: the user's cache folder", path=True)
