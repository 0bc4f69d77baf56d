"""Rules of where a run begins and what it keeps."""

import pytest

from gridtron.conf.checkpoint_rules import checkpoint_violations
from gridtron.conf.schema import Plan, plan_from_dict, plan_to_dict


def plan(evaluate: int = 0, **checkpoint: object) -> Plan:
    values = plan_to_dict(Plan())
    values["checkpoint"] |= checkpoint
    values["evaluation"]["every"] = evaluate
    return plan_from_dict(values)


@pytest.mark.parametrize(
    "checkpoint",
    [
        {},
        {"keep": 3},
        {"keep": 1, "keep_every": 1000, "every": 100},
        {"keep": 1, "keep_every": 1000},
        {"keep": 2, "keep_best": 1, "keep_metric": "loss"},
        {"init_from": "somewhere", "resume": "never"},
        {"copies": 2, "asynchronous": True},
    ],
    ids=str,
)
def test_what_goes_together(checkpoint: dict[str, object]) -> None:
    assert list(checkpoint_violations(plan(**checkpoint))) == []


def test_the_best_by_an_evaluation_that_is_made() -> None:
    assert list(checkpoint_violations(plan(evaluate=10, keep=1, keep_best=2))) == []


@pytest.mark.parametrize(
    ("checkpoint", "told"),
    [
        ({"keep_every": 10}, ["checkpoint.keep_every=10: has no effect without checkpoint.keep"]),
        ({"keep_best": 2, "keep_metric": "loss"}, ["checkpoint.keep_best=2: has no effect without checkpoint.keep"]),
        ({"keep": 1, "keep_best": 2}, ["evaluation.every=0 never evaluates"]),
        ({"keep_best": 2}, ["has no effect", "never evaluates"]),
        ({"keep": 1, "every": 30, "keep_every": 100}, ["nearest: 90"]),
        ({"keep": 1, "every": 30, "keep_every": 10}, ["nearest: 30"]),
        ({"resume": "/nowhere"}, ["checkpoint.resume=/nowhere: no such checkpoint"]),
        ({"resume": "/", "init_from": "x"}, ["leave one out"]),
    ],
    ids=str,
)
def test_what_does_not(checkpoint: dict[str, object], told: list[str]) -> None:
    found = [violation.message for violation in checkpoint_violations(plan(**checkpoint))]
    assert len(found) == len(told)
    for message, part in zip(found, told, strict=True):
        assert part in message
