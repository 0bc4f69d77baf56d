"""Every Triton kernel compiled for two architectures without a device, in a process that never interpreted one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gridtron.core.kernels.backend import MAXIMUM_COLUMNS
from gridtron.core.kernels.config import AVAILABLE

from .calls import CALLS

pytest.importorskip("triton")
CHILD = Path(__file__).with_name("ahead_of_time.py")
SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""What a block may have at most, in bytes."""
LONGEST = MAXIMUM_COLUMNS


def compiled(capabilities, extent, *names):
    command = [sys.executable, str(CHILD), capabilities, extent, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows, capabilities, spilled):
    assert {row["capability"] for row in rows} == set(capabilities)
    for row in rows:
        assert row["cubin"] > 0 and row["shared"] <= SHARED[row["capability"]] // 4, row
        if row["dtype"] == "float64":
            continue  # Right there too; no device is fast in it.
        # At the longest rows a little leaves the registers: still less than a second read of the row would be.
        assert row["spilled"] <= (512 if row["width"] == LONGEST else spilled), row
        # A kernel that reads number by number would leave half of the memory's rate; so do rows of odd addresses.
        assert row["vector"] >= 16 or row["width"] % 16, row


@pytest.mark.timeout(600)
def test_first_and_last_configuration_in_bf16():
    rows = compiled("80,90", "ends")
    check(rows, (80, 90), spilled=0)
    assert {CALLS[row["call"]].operation for row in rows} == set(AVAILABLE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [80, 90])
def test_every_configuration_and_dtype(capability):
    check(compiled(str(capability), "all"), (capability,), spilled=16)
