"""The order of data as a function: a keyed permutation of [0, n), computed place by place; no index is stored.

A Feistel network over the bits of n - 1, walked until it lands inside (Black and Rogaway 2002, "Ciphers with arbitrary
finite domains"): a bijection for any n, by construction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MASK = (1 << 64) - 1
# The finaliser of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def permute(places: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """The samples at ``places`` of the permutation of [0, size) that ``key`` picks.

    Args:
        places: any shape, each in [0, size).
        size: at least 1.
        key: 64 bits.

    Returns:
        int64, the same shape, each in [0, size); distinct for distinct places.
    """
    places = np.asarray(places, dtype=np.int64)
    assert size >= 1 and (not places.size or (places.min() >= 0 and places.max() < size)), (size, places)
    values = places.astype(np.uint64)
    bits = (size - 1).bit_length()
    if bits == 0:
        return places.copy()
    values = _network(values, bits, key)
    # Under half of the domain lies outside: the walk ends after two steps on average.
    outside = values >= np.uint64(size)
    while outside.any():
        values[outside] = _network(values[outside], bits, key)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _network(values: NDArray[np.uint64], bits: int, key: int) -> NDArray[np.uint64]:
    """A bijection of [0, 2^bits): each half is changed in turn by a function of the other one and the round's key."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number in range(_ROUNDS):
        low = low ^ (_mix(high, _round_key(key, 2 * number)) & low_mask)
        high = high ^ (_mix(low, _round_key(key, 2 * number + 1)) & high_mask)
    return (high << low_bits) | low


def _round_key(key: int, number: int) -> int:
    mixed = (key + (number + 1) * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _MIX[0]) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _MIX[1]) & _MASK
    return mixed ^ (mixed >> 31)


def _mix(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    mixed = values + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX[0])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX[1])
    return mixed ^ (mixed >> np.uint64(31))
