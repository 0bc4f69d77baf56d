"""What cannot be assembled is said before memory is asked for."""

import dataclasses

import pytest
from torch import nn

from gridtron.conf.compose import compose
from gridtron.core import Grid
from gridtron.core.errors import JobError
from gridtron.parallel.pipeline.build import build_schedule
from gridtron.tools import assemble
from gridtron.tools.assemble import check_memory, stages_fault


@pytest.mark.parametrize("words", [["model.num_layers=1000000000"], ["model.vocab_size=10000000000"]])
def test_a_model_larger_than_the_machine(words):
    with pytest.raises(JobError, match=r"grid.tensor=1, grid.pipeline=1 and data_parallel.zero=0, and cpu has"):
        check_memory(compose(["model=tiny", *words]), Grid.create())


def test_stages_of_a_users_own_model():
    schedule, model = build_schedule("interleaved_1f1b", 2, 4), nn.Module()
    assert stages_fault(model, None, 0) is None
    assert "runs stages [1, 3] on pipeline rank 1, and Module has none" in stages_fault(model, schedule, 1)
    model.stages = {1: nn.Identity()}
    fault = stages_fault(model, schedule, 1)
    assert "and its stages are [1]; give it an attribute stages={stage: module}" in fault
    model.stages = {3: nn.Identity(), 1: nn.Identity()}
    assert stages_fault(model, schedule, 1) is None


def test_a_schedules_file_that_changed(tmp_path):
    plan = compose(["model=tiny", "grid.pipeline=2", "launch.processes=2"])
    plan = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, schedule=str(tmp_path / "gone.csv")))
    with pytest.raises(JobError, match=r"pipeline.schedule: .*gone\.csv cannot be read: No such file"):
        assemble.build_schedule(plan, Grid.layout(2, pipeline=2))
    assert assemble.build_schedule(plan, Grid.layout(1)) is None


def test_a_model_that_fits():
    check_memory(compose(["model=gpt2_124m", "precision=fp64"]), Grid.create())
