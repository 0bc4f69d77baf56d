"""Triton without a GPU."""

from collections.abc import Iterator

import pytest
from interpreted import interpreted


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    pytest.importorskip("triton")
    with interpreted():
        yield
