"""Which attention heads each rank of the tensor axis holds: pure arithmetic, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.core.sharding import Ranges, even_ranges, nonempty


@dataclass(frozen=True)
class HeadSplit:
    """Which query and key/value heads each rank of the tensor axis holds.

    Query heads are split evenly, the first ranks one more where they do not divide. A rank holds the key/value heads
    that its query heads read, so one such head may lie on several ranks.

    Args:
        query: per rank, ranges of query heads.
        key_value: per rank, ranges of key/value heads.
    """

    query: tuple[Ranges, ...]
    key_value: tuple[Ranges, ...]

    @staticmethod
    def over(heads: int, key_value_heads: int, ranks: int) -> HeadSplit:
        group = heads // key_value_heads
        query = tuple(nonempty(piece) for piece in even_ranges(heads, ranks))
        key_value = tuple(
            tuple((start // group, (stop - 1) // group + 1) for start, stop in ranges) for ranges in query
        )
        return HeadSplit(query, key_value)

    def key_value_of(self, rank: int, group: int) -> list[int]:
        """For each local query head, the local index of the key/value head that it reads."""
        if not self.query[rank]:
            return []
        (start, stop), (first, _) = self.query[rank][0], self.key_value[rank][0]
        return [head // group - first for head in range(start, stop)]

    def picked_by_index(self, rank: int, group: int) -> bool:
        """Whether the key/value heads of ``rank`` are copied out one for each query head: where they do not serve equal
        groups in order, which is all that a grouped attention knows."""
        reads = self.key_value_of(rank, group)
        local = len(set(reads))
        regular = bool(reads) and reads == [head * local // len(reads) for head in range(len(reads))]
        return not (regular and len(reads) % local == 0)
