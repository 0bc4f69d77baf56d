"""Rules across groups, one by one: pure functions of a plan and of what surrounds it."""

import dataclasses
import re

import pytest

from gridtron.conf.rules import Surroundings, check_rules, folder_fault, needed_processes
from gridtron.conf.schema import Plan
from gridtron.models.config import GPTConfig
from gridtron.parallel.pipeline.build import FAMILIES, build_schedule
from gridtron.parallel.pipeline.csv_table import write_csv

FINE = {"data_fault": lambda config: None, "folder_fault": lambda folder: None}
SMALL = {"model.num_layers": 2, "model.hidden_size": 64, "model.num_attention_heads": 8, "model.vocab_size": 256}


def plan(**changes):
    result = Plan()
    for key, value in {**{key.replace(".", "__"): item for key, item in SMALL.items()}, **changes}.items():
        section, _, name = key.partition("__")
        part = dataclasses.replace(getattr(result, section), **{name: value})
        result = dataclasses.replace(result, **{section: part})
    return result


def messages(result, **around):
    return [item.message for item in check_rules(result, Surroundings(**{"cores": 64, **FINE, **around}))]


def test_a_right_plan_breaks_no_rule():
    assert messages(plan()) == []
    assert messages(plan(grid__tensor=4, grid__data=2, grid__sequence_parallel=True)) == []


# ---------------------------------------------------------------- processes
@pytest.mark.parametrize(
    ("changes", "launched", "needed"),
    [
        ({}, None, 1),
        ({"grid__tensor": 2}, None, 2),
        ({"grid__tensor": 2, "grid__data": 3}, None, 6),
        ({"grid__tensor": 2, "grid__pipeline": 4}, None, 8),
        ({"grid__tensor": -1, "grid__data": 3}, None, 3),
        ({"grid__tensor": 2, "launch__processes": 8}, None, 8),
        ({"grid__tensor": 2}, 4, 4),
    ],
)
def test_needed_processes(changes, launched, needed):
    assert needed_processes(plan(**changes), launched) == needed


@pytest.mark.parametrize(("tensor", "cores", "devices", "refused"), [
    (4, 2, 0, False), (8, 2, 0, True), (8, 4, 0, False), (8, 64, 8, False), (8, 64, 4, True), (4, 1, 4, False),
])  # fmt: skip
def test_more_processes_than_the_machine_has(tensor, cores, devices, refused):
    found = messages(plan(grid__tensor=tensor), cores=cores, devices=devices)
    assert bool(found) == refused
    if refused:
        assert "torchrun --nnodes" in found[0] and "srun --ntasks 8" in found[0] and "launch.processes=8" in found[0]


def test_a_number_given_by_hand_is_taken_at_its_word():
    assert messages(plan(grid__tensor=8, launch__processes=8), cores=1) == []


@pytest.mark.parametrize("value", ["many", 0, -2])
def test_processes_is_auto_or_a_number(value):
    found = messages(plan(launch__processes=value))
    assert found[0].startswith(f"launch.processes={value}: must be auto or")


def test_processes_against_the_launcher():
    assert "the launcher started 4" in messages(plan(launch__processes=2), launched=4)[0]
    assert messages(plan(launch__processes=4), launched=4) == []


# ---------------------------------------------------------------- grid
def test_sizes_that_do_not_multiply():
    (found,) = messages(plan(grid__tensor=3), launched=4)
    assert "tensor=3" in found and "4 ranks" in found and "tensor=2" in found


@pytest.mark.parametrize("axis", ["tensor", "data", "pipeline", "context"])
def test_zero_is_no_size(axis):
    assert f"grid.{axis}=0: must be at least 1" in messages(plan(**{f"grid__{axis}": 0}))[0]


def test_pipeline_left_over():
    assert messages(plan(grid__pipeline=-1, grid__data=1), launched=2) == []
    assert "over 3 stages" in messages(plan(grid__pipeline=-1, grid__data=1), launched=3)[0]


def test_context_is_not_built():
    found = messages(plan(grid__context=-1, grid__data=1), launched=2)
    assert found and "context parallelism is not built yet" in found[0]


def test_order_names_each_axis():
    assert "order" in messages(plan(grid__order=["tensor", "data"]))[0]


# ---------------------------------------------------------------- model
@pytest.mark.case(19)
@pytest.mark.parametrize(("tensor", "refused"), [(3, False), (4, False), (8, False), (9, True), (16, True)])
def test_heads_and_tensor(tensor, refused):
    found = messages(plan(grid__tensor=tensor, model__num_key_value_heads=2))
    assert bool(found) == refused
    if refused:
        assert (
            f"grid.tensor={tensor}" in found[0]
            and "num_attention_heads=8" in found[0]
            and found[0].endswith("grid.tensor=8")
        )


def test_ffn_and_vocabulary_and_tensor():
    found = messages(plan(grid__tensor=8, model__ffn_hidden_size=5, model__vocab_size=3))
    assert "model.ffn_hidden_size=5 and model.vocab_size=3 can use; nearest: grid.tensor=3" in found[0]


@pytest.mark.parametrize("tensor", [2, 4, 14])
def test_qwen_heads_run_unevenly(tensor):
    sized = plan(
        grid__tensor=tensor, model__num_attention_heads=14, model__num_key_value_heads=2, model__hidden_size=896
    )
    assert messages(sized) == []


def test_own_rules_of_the_shape():
    found = messages(plan(model__num_key_value_heads=3, model__hidden_size=68))
    assert len(found) == 2
    assert found[0].startswith("model.num_attention_heads=8 is not a multiple of model.num_key_value_heads=3")
    assert found[1].startswith("model.hidden_size=68 is not a multiple") and "model.head_dim" in found[1]


def test_a_users_own_model_has_its_own_rules():
    built = dataclasses.replace(plan(grid__tensor=16), model=GPTConfig(build="mine:build", num_attention_heads=7))
    assert messages(built) == []


# ---------------------------------------------------------------- pipeline
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline__schedule": "zb_h"}, "pipeline.schedule='zb_h': it is one of .*; nearest: zb_h[12]"),
        ({"pipeline__schedule": "1F1B"}, "pipeline.schedule='1F1B': .*nearest: 1f1b"),
        ({"pipeline__chunks": 2}, "pipeline.chunks=2 with the schedule 1f1b.*nearest: pipeline.chunks=1"),
        ({"pipeline__schedule": "zb_v", "pipeline__chunks": 1}, "nearest: pipeline.chunks=2"),
        ({"pipeline__schedule": "dualpipe_v", "pipeline__chunks": 3}, "nearest: pipeline.chunks=2"),
        (
            {"grid__pipeline": 3},
            r"model.num_layers=2 over 3 stages \(grid.pipeline=3, 1 a rank in 1f1b\).*"
            "nearest: model.num_layers=3, grid.pipeline=2$",
        ),
        (
            {"grid__pipeline": 2, "pipeline__schedule": "interleaved_1f1b"},
            "model.num_layers=2 over 4 stages.*model.num_layers=4, grid.pipeline=1, pipeline.chunks=1$",
        ),
        ({"grid__pipeline": 2, "pipeline__schedule": "zb_v"}, "model.num_layers=4, grid.pipeline=1$"),
        (
            {"grid__pipeline": 2, "pipeline__layers_per_stage": [2]},
            r"pipeline.layers_per_stage=\[2\] has 1 counts and there are 2 stages",
        ),
        (
            {"grid__pipeline": 2, "pipeline__layers_per_stage": [2, 1]},
            r"is 3 layers in sum and model.num_layers=2; nearest: \[1,1\]",
        ),
    ],
)
def test_schedules_that_do_not_fit(changes, words):
    (found,) = messages(plan(**changes))
    assert re.search(words, found), found


@pytest.mark.parametrize("schedule", FAMILIES)
@pytest.mark.parametrize(("ranks", "batch"), [(1, 2), (2, 2), (4, 6), (4, 64)])
def test_schedules_that_fit(schedule, ranks, batch):
    """Also with fewer microbatches than ranks; and a family is no fault where there is no pipeline."""
    stages = len(build_schedule(schedule, ranks, 1).placement)
    shape = {"model__num_layers": stages, "train__global_batch_size": batch}
    assert messages(plan(grid__pipeline=ranks, pipeline__schedule=schedule, **shape)) == []
    counts = plan(grid__pipeline=ranks, pipeline__schedule=schedule, pipeline__layers_per_stage=[1] * stages, **shape)
    assert messages(counts) == []


def test_a_table_from_a_file(tmp_path):
    """Its ranks, microbatches and stages are those of the run; all that differs is told at once."""
    file = tmp_path / "mine, and yours.csv"
    write_csv(build_schedule("1f1b", 2, 4), file)
    fitting = {"grid__pipeline": 2, "pipeline__schedule": str(file), "train__global_batch_size": 8}
    assert messages(plan(**fitting)) == []
    assert messages(plan(**fitting, pipeline__layers_per_stage=[1, 1], pipeline__chunks=1)) == []
    ranks, batch = messages(plan(**fitting | {"grid__pipeline": 4, "train__global_batch_size": 6}))
    assert ranks.startswith("grid.pipeline=4: ") and ranks.endswith("nearest: grid.pipeline=2")
    assert "6: 3 microbatches of train.micro_batch_size=2 on data=1" in batch and batch.endswith("batch_size=8")
    assert "is a table for 2 ranks" in messages(plan(**fitting | {"grid__pipeline": 1}))[0]
    assert messages(plan(**fitting, pipeline__chunks=2))[0].endswith("nearest: pipeline.chunks=null")
    assert messages(plan(**fitting, pipeline__layers_per_stage=[2]))[0].startswith("pipeline.layers_per_stage=[2] has")
    (missing,) = messages(plan(**fitting | {"pipeline__schedule": str(tmp_path / "none.csv")}))
    assert missing.startswith("pipeline.schedule: ") and "none.csv cannot be read: No such file or directory" in missing
    (tmp_path / "folder.csv").mkdir()
    (folder,) = messages(plan(**fitting | {"pipeline__schedule": str(tmp_path / "folder.csv")}))
    assert "Is a directory" in folder
    file.write_text("0F0,0F1\n1B0,nonsense\n")
    (broken,) = messages(plan(**fitting))
    assert broken.startswith("pipeline.schedule: ") and str(file) in broken and broken.count("\n") < 10


# ---------------------------------------------------------------- sequence
@pytest.mark.case(20)
@pytest.mark.parametrize("length", [6, 7, 8])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("parallel", [False, True])
def test_sequence_and_tensor(length, tensor, parallel):
    found = messages(plan(train__sequence_length=length, grid__tensor=tensor, grid__sequence_parallel=parallel))
    assert bool(found) == (parallel and length % tensor != 0)
    if found:
        assert f"train.sequence_length={length}" in found[0] and f"grid.tensor={tensor}" in found[0]


def test_nearest_sequence_length():
    (found,) = messages(plan(train__sequence_length=7, grid__tensor=2, grid__sequence_parallel=True))
    assert "sequence_length 6 or 8, tensor 1" in found


def test_learned_positions_end():
    learned = {"model__position": "learned", "model__max_position_embeddings": 128}
    assert messages(plan(**learned, train__sequence_length=128)) == []
    assert "nearest: train.sequence_length=128" in messages(plan(**learned, train__sequence_length=129))[0]
    (rotary,) = messages(plan(model__max_position_embeddings=128, train__sequence_length=129))
    assert "the longest sequence is model.max_position_embeddings=128" in rotary
    assert rotary.endswith("nearest: train.sequence_length=128, or model.max_position_embeddings=129")


# ---------------------------------------------------------------- batch and run
@pytest.mark.parametrize(
    ("batch", "micro", "data", "words"),
    [
        (16, 2, 8, None),
        (15, 2, 1, "14 or 16, or micro_batch_size 1"),
        (10, 4, 2, "8 or 16, or micro_batch_size 5"),
        (2, 4, 2, "global_batch_size 8, or micro_batch_size 1"),
        (1, 1, 2, "global_batch_size 2"),
    ],
)
def test_batch(batch, micro, data, words):
    found = messages(plan(train__global_batch_size=batch, train__micro_batch_size=micro, grid__data=data))
    assert (found == []) if words is None else found[0].endswith(words)
    assert all(f"={value}" in found[0] for value in (batch, micro, data) if found)


def test_batch_with_data_left_over():
    assert "data=3" in messages(plan(train__global_batch_size=16), launched=3)[0]


def test_evaluation_needs_held_out():
    assert messages(plan(evaluation__every=5)) == []
    assert "data.held_out=0 keeps nothing" in messages(plan(evaluation__every=5, data__held_out=0.0))[0]
    assert messages(plan(data__held_out=0.0)) == []


@pytest.mark.parametrize(
    ("value", "right"), [("2:5", True), ("3:3", True), ("5:2", False), ("0:2", False), ("a", False)]
)
def test_profile(value, right):
    assert (messages(plan(logging__profile=value)) == []) == right


def test_warmup_and_stop_beyond_the_end_are_no_fault():
    long = plan(train__steps=5, lr_schedule__warmup_steps=100, lr_schedule__decay_steps=1000, train__stop_after=50)
    assert messages(long) == []


def test_folders(tmp_path):
    (tmp_path / "file").write_text("")
    assert folder_fault(str(tmp_path / "new" / "deep")) is None
    assert "is a file" in folder_fault(str(tmp_path / "file"))
    assert "is a file" in folder_fault(str(tmp_path / "file" / "deep"))
    found = messages(
        plan(run__directory="/x", data__directory="/y"), folder_fault=lambda folder: f"{folder} cannot be written"
    )
    assert [line.partition(":")[0] for line in found] == ["run.directory=/x", "data.directory=/y"]


def test_folder_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written" in folder_fault(str(tmp_path))


def test_data_and_resume():
    assert messages(plan(), data_fault=lambda config: "data.path=x: no such file") == ["data.path=x: no such file"]
    assert "no such checkpoint" in messages(plan(checkpoint__resume="/no/such"))[0]
    assert messages(plan(checkpoint__resume="never")) == []


def test_surroundings_of_this_machine():
    here = Surroundings.here({"CUDA_VISIBLE_DEVICES": ""})
    assert here.cores >= 1 and here.devices == 0 and here.launched is None


# ---------------------------------------------------------------- precision
def test_a_loss_scale_is_a_power_of_two():
    assert messages(plan(precision__mode="fp16", precision__loss_scale=2.0**10)) == []
    (found,) = messages(plan(precision__mode="fp16", precision__loss_scale=1000.0))
    assert found == (
        "precision.loss_scale=1000: a loss scale is a power of two from 1 to 2^32, so that it changes no digit of a "
        "gradient; nearest: 1024"
    )


# ---------------------------------------------------------------- data parallelism
def test_shards_divide_the_data_ranks():
    found = messages(
        plan(grid__data=6, train__global_batch_size=12, data_parallel__zero=2, data_parallel__shard_size=4)
    )
    assert found == [
        "data_parallel.shard_size=4: does not divide the 6 data ranks; nearest: data_parallel.shard_size=3"
    ]
    fits = plan(grid__data=6, train__global_batch_size=12, data_parallel__zero=3, data_parallel__shard_size=3)
    assert messages(fits) == []


def test_shards_of_what_is_whole():
    (found,) = messages(plan(grid__data=2, data_parallel__shard_size=2))
    assert "cuts what data_parallel.zero=0 keeps whole" in found and "nearest: data_parallel.zero=1" in found
