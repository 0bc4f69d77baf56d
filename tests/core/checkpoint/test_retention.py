"""Which checkpoints are kept: over every choice, as a pure function; then on the disk."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gridtron.core.checkpoint.layout import complete_checkpoints, step_path
from gridtron.core.checkpoint.retention import Retention, prune
from gridtron.core.checkpoint.save import save
from gridtron.core.checkpoint.tensors import ShardedTensorView
from gridtron.core.files import Files
from gridtron.core.grid import Grid
from gridtron.core.sharding import Sharding

STEPS = [5, 10, 15, 20, 25, 30]
LOSSES = {5: 3.0, 10: 1.0, 15: 2.0, 20: 1.0, 25: math.nan}


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), STEPS),
        (Retention(every=10, best=1), STEPS),
        (Retention(last=1), [30]),
        (Retention(last=2), [25, 30]),
        (Retention(last=9), STEPS),
        (Retention(last=1, every=10), [10, 20, 30]),
        (Retention(last=1, best=1), [10, 30]),
        (Retention(last=2, best=3), [10, 15, 20, 25, 30]),
        (Retention(last=1, every=15, best=2), [10, 15, 20, 30]),
    ],
)
def test_what_is_kept(retention: Retention, kept: list[int]) -> None:
    gone = retention.superfluous(STEPS, LOSSES)
    assert [step for step in STEPS if step not in gone] == kept


@given(
    st.sets(st.integers(0, 99)), st.dictionaries(st.integers(0, 99), st.floats()), st.integers(1, 5),
    st.integers(0, 20), st.integers(0, 4),
)  # fmt: skip
def test_the_newest_stays_and_no_rule_takes_from_another(
    steps: set[int], values: dict[int, float], last: int, every: int, best: int
) -> None:
    whole = set(Retention(last, every, best).superfluous(list(steps), values))
    apart = [Retention(last), Retention(last, every), Retention(last, 0, best)]
    assert whole <= set.intersection(*(set(rule.superfluous(list(steps), values)) for rule in apart))
    assert not whole & set(sorted(steps)[-last:])
    assert whole <= steps


def make(root: Path, step: int, loss: object) -> None:
    state = {"parameters/w": ShardedTensorView(torch.ones(3), Sharding.whole((3,)))}
    save(step_path(root, step), state, {"metrics": {"eval_loss": loss}}, Grid.layout(1))


def test_on_the_disk(tmp_path: Path) -> None:
    for step, loss in zip(STEPS, [3.0, 1.0, "rubbish", 1.5, None, 9.0], strict=True):
        make(tmp_path, step, loss)
    other = tmp_path / "step-notes"
    other.mkdir()
    assert prune(tmp_path, Retention(last=1, best=1), Files(), {}) == [5, 15, 20, 25]
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000010", "step-00000030"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000010",
        "step-00000030",
        "step-notes",
    ]
