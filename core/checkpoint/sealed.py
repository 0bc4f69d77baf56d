"""JSON under a checksum of its own, for the manifest: a byte that changed is found before anything is understood."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from gridtron.core.checkpoint.layout import CheckpointError

SMALL = 1 << 26
"""Bytes that a manifest may have whatever it describes; above, no more than the data it describes."""
_LARGEST = 1 << 30
_SEAL = re.compile(rb'\{\n "xxh3": "([0-9a-f]{16})",\n')


def seal(content: Mapping[str, Any]) -> bytes:
    """The JSON of an object, its first line the checksum of all bytes after that line."""
    text = json.dumps(content, indent=1, allow_nan=True).removeprefix("{\n") + "\n"
    return f'{{\n "xxh3": "{xxhash.xxh3_64_hexdigest(text.encode())}",\n{text}'.encode()


def unsealed(content: bytes) -> Any:
    """What :func:`seal` was given, and the checksum.

    Raises:
        ValueError: another checksum, no JSON, a key that stands twice.
    """
    found = _SEAL.match(content)
    if not found:
        raise ValueError("it does not begin with its checksum")
    if xxhash.xxh3_64_hexdigest(memoryview(content)[found.end() :]) != found[1].decode():
        raise ValueError("its checksum differs")
    return json.loads(content.decode(), object_pairs_hook=_without_duplicates)


def check_size(size: int, data: Iterable[int], what: str) -> None:
    """Whether a manifest may have ``size`` bytes over data files of the sizes ``data``.

    Raises:
        CheckpointError: it is larger than any can be.
    """
    largest = min(_LARGEST, max(SMALL, sum(data)))
    if size > largest:
        raise CheckpointError(
            f"{what} has {size} bytes, more than {largest}: none can be so large; use another checkpoint"
        )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"{twice!r:.80} stands there twice")
    return found
