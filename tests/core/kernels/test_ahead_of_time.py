"""Every Triton kernel compiled for two architectures without a device, in a process that never interpreted one."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from gridtron.core.kernels.config import operations

from .calls import CALLS

pytest.importorskip("triton")
CHILD = Path(__file__).with_name("ahead_of_time.py")
SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""What a block may have at most, in bytes."""


def compiled(capabilities, extent, *names):
    command = [sys.executable, str(CHILD), capabilities, extent, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows, capabilities, spilled):
    by_call = defaultdict(set)
    for row in rows:
        by_call[row["capability"]].add(row["call"])
        assert row["cubin"] > 0 and row["shared"] <= SHARED[row["capability"]] // 4, row
        # At the sizes in use next to nothing leaves the registers but in float64, which no device is tuned for.
        assert row["spilled"] <= spilled or row["dtype"] == "float64", row
        # A kernel that reads number by number leaves half of the memory's rate.
        assert row["vector"] >= 16 or row["dtype"] == "float64", row
    assert set(by_call) == set(capabilities)


@pytest.mark.timeout(600)
def test_first_and_last_configuration_in_bf16():
    rows = compiled("80,90", "ends")
    check(rows, (80, 90), spilled=0)
    assert {CALLS[row["call"]].operation for row in rows} == set(operations())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [80, 90])
def test_every_configuration_and_dtype(capability):
    check(compiled(str(capability), "all"), (capability,), spilled=16)
