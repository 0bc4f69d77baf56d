"""The list of options, and that nothing in a config dataclass escapes it."""

import dataclasses
import json

import pytest
import yaml

from gridtron.conf.refusal import Refusal
from gridtron.conf.schema import SECTIONS, Plan, all_options, check_option, plan_from_dict, plan_to_dict
from gridtron.conf.values import Violation

OPTIONS = """
run.directory
grid.data grid.pipeline grid.context grid.tensor grid.order grid.sequence_parallel grid.overlap
pipeline.schedule pipeline.chunks pipeline.layers_per_stage
recompute.mode recompute.layers recompute.operations recompute.budget_bytes
data_parallel.zero data_parallel.bucket_bytes data_parallel.shard_size data_parallel.reduce
precision.mode precision.loss_scale precision.loss_scale_interval
model.num_layers model.hidden_size model.num_attention_heads model.num_key_value_heads model.head_dim
model.ffn_hidden_size model.vocab_size model.max_position_embeddings model.normalization model.norm_eps model.position
model.rope_theta model.rope_scaling model.rotary_fraction model.activation model.bias model.qkv_bias
model.mlp_bias model.parallel_residual model.tie_embeddings model.dropout
model.attention_dropout model.init_std model.build
train.steps train.stop_after train.global_batch_size train.micro_batch_size train.sequence_length train.seed
train.compile train.on_nonfinite train.max_nonfinite train.garbage_collection_every
optimizer.name optimizer.lr optimizer.betas optimizer.eps optimizer.weight_decay optimizer.momentum
optimizer.ns_steps optimizer.grad_clip
lr_schedule.name lr_schedule.warmup_steps lr_schedule.decay_steps lr_schedule.min_ratio
data.path data.tokenizer data.held_out data.directory
evaluation.every evaluation.steps
checkpoint.every checkpoint.resume checkpoint.init_from checkpoint.asynchronous checkpoint.copies checkpoint.keep
checkpoint.keep_every checkpoint.keep_best checkpoint.keep_metric checkpoint.strict checkpoint.allow_changes
logging.every logging.tensorboard logging.grad_norms logging.trace logging.profile
launch.processes launch.preempted_exit
kernels.backend kernels.rms_norm kernels.layer_norm kernels.rope kernels.swiglu kernels.bias_gelu
kernels.scaled_masked_softmax kernels.cross_entropy kernels.linear_cross_entropy kernels.dropout_add kernels.adamw
kernels.chunked_loss
plugins
"""


def test_the_list_of_options():
    """Each new option is a decision: it is added here by hand."""
    assert list(all_options()) == OPTIONS.split()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_assignment_is_a_field(section):
    """``steps = 5`` without a type is a class attribute, not an option, and would be ignored without a word."""
    schema = SECTIONS[section]
    fields = {item.name for item in dataclasses.fields(schema)}
    stray = {
        name
        for name, value in vars(schema).items()
        if not name.startswith("_") and name not in fields and not callable(value) and not isinstance(value, property)
    }
    assert not stray


def test_the_test_above_sees_a_stray_assignment():
    @dataclasses.dataclass(frozen=True)
    class Stray:
        good: int = 1
        bad = 2

    assert [item.name for item in dataclasses.fields(Stray)] == ["good"] and "bad" in vars(Stray)


@pytest.mark.parametrize("section", SECTIONS)
def test_config_dataclasses_are_frozen(section):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(SECTIONS[section](), dataclasses.fields(SECTIONS[section])[0].name, 1)


@pytest.mark.parametrize("key", OPTIONS.split())
def test_every_option_has_a_meaning_and_a_default_that_fits(key):
    entry = all_options()[key]
    assert entry.meaning and "\n" not in entry.meaning
    assert not isinstance(check_option(entry, entry.default), Violation)


def test_plan_survives_yaml_and_json():
    plan = dataclasses.replace(
        Plan(),
        model=dataclasses.replace(Plan().model, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        logging=dataclasses.replace(Plan().logging, profile="2:5"),
        data=dataclasses.replace(Plan().data, path="~/a b, 'c'=\"d\".txt"),
        choices={"model": "tiny"},
    )
    values = plan_to_dict(plan)
    assert plan_from_dict(json.loads(json.dumps(values))) == plan
    again = plan_from_dict(yaml.safe_load(yaml.safe_dump(values)))
    assert again == plan and again.choices == {"model": "tiny"}
    assert isinstance(again.optimizer.betas, tuple)


def test_everything_wrong_in_a_stored_plan_is_listed():
    values = plan_to_dict(Plan())
    values["train"]["step"] = 5
    values["model"]["hidden_size"] = "wide"
    values["gird"] = {}
    values["optimizer"] = 3
    with pytest.raises(Refusal) as caught:
        plan_from_dict(values)
    assert len(caught.value.violations) == 4
    text = str(caught.value)
    assert "nearest: train.steps" in text and "model.hidden_size=wide: needs an int" in text
    assert "gird" in text and "optimizer.NAME=VALUE" in text


def test_keys_left_out_take_their_defaults():
    assert plan_from_dict({"train": {"steps": 7}}).train == dataclasses.replace(Plan().train, steps=7)
