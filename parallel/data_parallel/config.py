"""Options of data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class DataParallelConfig:
    zero: int = option(
        0,
        "ZeRO stage over the data ranks. 0: all states on each; 1: the optimizer's are cut; 2: gradients too; "
        "3: parameters too",
        choices=(0, 1, 2, 3),
    )
    bucket_bytes: int = option(25 * 1024 * 1024, "size of a bucket of gradients, in bytes", minimum=1)
    shard_size: int | None = option(
        None,
        "with zero above 0: states are cut over groups of so many data ranks and repeated over the groups; "
        "null: over all",
        minimum=1,
    )
    reduce: str | None = option(
        None,
        "gradients travel after each microbatch, or once after the last; null: last at zero 0 and 1, each at 2 and 3, "
        "whose memory is what they are chosen for",
        choices=("each", "last"),
    )


def reduces_each(zero: int, reduce: str | None) -> bool:
    """Whether every microbatch's gradients are reduced by themselves.

    Raises:
        ValueError: another word.
    """
    if reduce not in (None, "each", "last"):
        raise ValueError(f'reduce={reduce!r}: it is "each" or "last"')
    return reduce == "each" if reduce is not None else zero >= 2


def check_arguments(zero: int, bucket_bytes: int, shard_size: int | None) -> None:
    """What holds on any axis.

    Raises:
        ValueError: a stage that there is not, a bucket without room, shards of what is whole.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero}: it is 0, 1, 2 or 3")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes}: a bucket holds at least 1 byte")
    if shard_size is not None and zero == 0:
        raise ValueError(f"shard_size={shard_size} cuts what zero=0 keeps whole; give zero=1, 2 or 3, or leave it")
