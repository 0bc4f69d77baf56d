"""The nearest option to what people type."""

import pytest

from gridtron.conf.names import _ALIASES, _NOT_BUILT, nearest_key, not_built_value, unknown_key
from gridtron.conf.schema import all_options

KNOWN = list(all_options())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("grid.tenzor", "grid.tensor"),
        ("grid.tensr", "grid.tensor"),
        ("train.micro_batchsize", "train.micro_batch_size"),
        ("train.microbatch_size", "train.micro_batch_size"),
        ("optim.warmpu_steps", "lr_schedule.warmup_steps"),
        ("optimizer.warmup_steps", "lr_schedule.warmup_steps"),
        ("optimzer.lr", "optimizer.lr"),
        ("trian.steps", "train.steps"),
        ("train.step", "train.steps"),
        ("model.hiden_size", "model.hidden_size"),
        ("model.n_layer", "model.num_layers"),
        ("data.tokeniser", "data.tokenizer"),
        ("run.dir", "run.directory"),
        ("evaluation.interval", "evaluation.every"),
        ("tp", "grid.tensor"),
        ("pp", "grid.pipeline"),
        ("dp", "grid.data"),
        ("cp", "grid.context"),
        ("mbs", "train.micro_batch_size"),
        ("gbs", "train.global_batch_size"),
        ("bs", "train.global_batch_size"),
        ("lr", "optimizer.lr"),
        ("seq_len", "train.sequence_length"),
        ("tensor_model_parallel_size", "grid.tensor"),
        ("hidden_size", "model.hidden_size"),
        ("ffn_hidden_size", "model.ffn_hidden_size"),
        ("micro_batch_size", "train.micro_batch_size"),
        ("num-layers", "model.num_layers"),
        ("num_hidden_layers", "model.num_layers"),
        ("intermediate_size", "model.ffn_hidden_size"),
        ("n_layer", "model.num_layers"),
        ("learning_rate", "optimizer.lr"),
        ("per_device_train_batch_size", "train.micro_batch_size"),
        ("train.learning_rate", "optimizer.lr"),
        ("model.rms_norm_eps", "model.norm_eps"),
        ("max_grad_nrom", "optimizer.grad_clip"),
    ],
)
def test_nearest(typed, meant):
    assert nearest_key(typed, KNOWN) == meant


@pytest.mark.parametrize("typed", ["foo.bar", "zzz", "qqqq.wwww"])
def test_nothing_near(typed):
    assert nearest_key(typed, KNOWN) is None
    assert unknown_key(typed, KNOWN).endswith("docs/configuration.md lists all")


def test_aliases_lead_to_options_that_exist():
    assert set(_ALIASES) <= set(KNOWN)
    names = [name for names in _ALIASES.values() for name in names]
    assert len(names) == len(set(names)), "one alias for two options"
    assert not set(names) & set(KNOWN)


def test_what_is_not_built_does_not_exist_yet():
    assert not [key for key in _NOT_BUILT for known in KNOWN if known == key or known.startswith(f"{key}.")]


@pytest.mark.parametrize("key", ["logging.wandb", "data.packing", "cluster.nodes"])
def test_not_built_is_refused_by_name(key):
    assert unknown_key(key, KNOWN).startswith(f"{key}: not built yet (")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("grid.context", 4, "context parallelism is not built yet"),
    ],
)
def test_values_that_are_not_built(key, value, words):
    assert words in not_built_value(key, value)


@pytest.mark.parametrize(
    ("key", "value"), [("grid.pipeline", 2), ("grid.context", 1), ("data_parallel.zero", 3), ("precision.mode", "fp61")]
)
def test_other_values_are_not_called_unbuilt(key, value):
    assert not_built_value(key, value) is None
