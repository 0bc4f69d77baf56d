"""What is recomputed is refused by name, with the nearest that goes, before anything starts."""

import re

import pytest

from gridtron.conf.compose import Refusal, compose
from gridtron.conf.rules import Surroundings

AROUND = Surroundings(cores=64, data_fault=lambda config: None, folder_fault=lambda folder: None)


def refused(*words):
    with pytest.raises(Refusal) as caught:
        compose(["model=tiny", *words], surroundings=AROUND)
    return caught.value.violations


@pytest.mark.parametrize("pipeline", ["zb_h1", "zb_h2", "zb_v", "dualpipe_v"])
def test_operations_do_not_go_with_a_split_backward_pass(pipeline):
    words = ["recompute=selective", "recompute.operations=[attention]", "grid.pipeline=2", "model.num_layers=4"]
    (message,) = refused(*words, f"pipeline={pipeline}")
    assert f"pipeline.schedule={pipeline}" in message and "nearest: recompute.operations=null" in message
    assert compose([*words, "model=tiny", "pipeline=1f1b"], surroundings=AROUND).recompute.operations == ["attention"]
    # On one pipeline rank the schedule is not used.
    alone = ["model=tiny", *words[:2], f"pipeline={pipeline}"]
    assert compose(alone, surroundings=AROUND).recompute.mode == "selective"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("recompute=auto", "recompute.mode=auto: it chooses by what a rank may hold at a step's peak; set recompute."),
        ("recompute.budget_bytes=1e9", "nothing is chosen by it with recompute.mode=none; set recompute.mode=auto"),
        ("recompute.operations=[attention]", "has no effect with recompute.mode=none; set recompute.mode=selective"),
    ],
)
def test_options_that_need_each_other(words, message):
    (found,) = refused(words)
    assert message in found


def test_an_unknown_operation_has_a_nearest():
    (message,) = refused("recompute=selective", "recompute.operations=[aten.mmm]")
    assert message.endswith("'aten.mmm' is no operation of a layer; nearest: aten.mm")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("grid.data=2", "precision=bf16"),
        ("grid.pipeline=2", "model.num_layers=4", "train.global_batch_size=8"),
        ("grid.pipeline=2", "pipeline=zb_v", "model.num_layers=4", "train.global_batch_size=8"),
        ("grid.tensor=2", "grid.sequence_parallel=true"),
    ],
)
def test_the_budget_that_a_refusal_names_is_the_smallest(words):
    (message,) = refused("recompute=auto", "recompute.budget_bytes=1", *words)
    need = int(re.search(r"nearest: recompute\.budget_bytes=(\d+)", message)[1])
    compose(["model=tiny", "recompute=auto", f"recompute.budget_bytes={need}", *words], surroundings=AROUND)
    (message,) = refused("recompute=auto", f"recompute.budget_bytes={need - 1}", *words)
    assert f"budget_bytes={need}" in message


def test_a_model_of_ones_own_has_no_known_memory():
    (message,) = refused("recompute=auto", "recompute.budget_bytes=1e9", "model.build=torch.nn:Linear")
    assert "the memory of a model of your own is not known" in message
