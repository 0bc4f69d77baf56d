"""Options of data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class DataParallelConfig:
    zero: int = option(0, "ZeRO stage: 0, gradients in buckets, all states on every rank", choices=(0,))
    bucket_bytes: int = option(25 * 1024 * 1024, "size of a bucket of gradients, in bytes", minimum=1)
