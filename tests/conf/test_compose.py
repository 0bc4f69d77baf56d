"""From the command line's words to a plan, or to every fault at once."""

import dataclasses
import os
import subprocess
import sys

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from gridtron.conf.compose import Refusal, check_request, compose
from gridtron.conf.rules import Surroundings
from gridtron.conf.schema import Plan, plan_to_dict

AROUND = Surroundings(cores=8, data_fault=lambda config: None, folder_fault=lambda folder: None)


def plan_of(*overrides, **more):
    return compose(overrides, surroundings=AROUND, **more)


def faults_of(*overrides, **more):
    with pytest.raises(Refusal) as caught:
        plan_of(*overrides, **more)
    assert all("\n" not in line for line in caught.value.violations)
    return caught.value.violations


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a ./conf of its own."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write


# ---------------------------------------------------------------- what is right
def test_nothing_given():
    plan = plan_of()
    assert plan.grid == Plan().grid and plan.train == Plan().train and plan.model.vocab_size == 256


def test_values_and_groups():
    plan = plan_of(
        "experiment=first_run", "precision=fp64", "optimizer=sgd", "recompute=full", "grid.tensor=1", "train.steps=1e2"
    )
    assert (plan.precision.mode, plan.optimizer.name, plan.recompute.mode) == ("fp64", "sgd", "full")
    assert plan.grid.tensor == 1 and plan.train.steps == 100 and plan.model.num_layers == 12


def test_a_model_takes_the_place_of_the_experiments():
    assert plan_of("experiment=first_run", "model=tiny").model.num_layers == 4


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_prefixes_of_hydra_mean_nothing_more(prefix):
    assert plan_of(f"{prefix}train.steps=7").train.steps == 7


def test_later_words_win():
    assert plan_of("train.steps=7", "train.steps=8").train.steps == 8


def test_lists_and_null():
    plan = plan_of("optimizer.betas=[0.8,0.9]", "model.num_key_value_heads=null", "data.path=null")
    assert plan.optimizer.betas == (0.8, 0.9) and plan.model.num_key_value_heads is None and plan.data.path is None


def test_a_dictionary_replaces_the_files():
    plan = plan_of("model=llama31_8b", "model.rope_scaling={type: linear, factor: 2}")
    assert plan.model.rope_scaling == {"type": "linear", "factor": 2}
    assert plan_of("model=llama31_8b", "model.rope_scaling.factor=16.0").model.rope_scaling["factor"] == 16.0


@pytest.mark.parametrize(
    "path",
    [
        "/a/my books/x.txt", "/a/b,c.txt", "/a/it's.txt", '/a/"q".txt', "/a/b=c.txt", "/a/*.txt", "/a/[x].txt",
        "/a/{x}.txt", "/a/(x).txt", "/a/x:y.txt", "/a/$HOME/x", "/a/ä.txt", "/a/back\\slash", "/a/ends\\", "/a/'both\"",
        "/a/ b ", "12", "true", "/a/%41#x?y&z;w|v<u>", "/a/\\'x",
    ],
)  # fmt: skip
def test_paths_come_through_as_typed(path):
    """Through the quoting and Hydra's grammar; composition itself carries any string."""
    request = check_request([f"data.path={path}"])
    (accepted,) = request.checked.accepted
    assert OverridesParser.create().parse_override(accepted).value() == path


def test_paths_come_through_composition():
    odd = '/a/it\'s, \\ "q" b=c [x] {y} $HOME.txt'
    plan = plan_of(f"data.path={odd}", f"run.directory={odd}/")
    assert plan.data.path == odd and plan.run.directory == odd + "/"


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert plan_of("data.path=~/my books/*.txt").data.path == "/home/me/my books/*.txt"
    assert plan_of("data.path='~/a, b.txt'").data.path == "/home/me/a, b.txt"


def test_quotes_of_hydra_are_taken_off():
    assert plan_of("data.path='/a, b.txt'").data.path == "/a, b.txt"
    assert plan_of('data.path="/a, b.txt"').data.path == "/a, b.txt"


def test_vocabulary_comes_from_the_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models

    file = tmp_path / "t.json"
    Tokenizer(models.WordLevel({f"w{number}": number for number in range(300)}, unk_token="w0")).save(str(file))
    assert plan_of(f"data.tokenizer={file}").model.vocab_size == 300
    assert plan_of(f"data.tokenizer={file}", "model.vocab_size=512").model.vocab_size == 512
    (fault,) = faults_of(f"data.tokenizer={file}", "model.vocab_size=256")
    assert "model.vocab_size=256: data.tokenizer=t.json has 300 ids; nearest: model.vocab_size=300" in fault


# ---------------------------------------------------------------- what is wrong
@pytest.mark.case(42)
def test_all_three_at_once():
    faults = faults_of("experiment=first_run", "+train.micro_batchsize=4", "grid.tenzor=2", "optimizer.lr=-1")
    assert faults == [
        "+train.micro_batchsize=4: there is no option train.micro_batchsize; nearest: train.micro_batch_size",
        "grid.tenzor=2: there is no option grid.tenzor; nearest: grid.tensor",
        "optimizer.lr=-1: must be at least 0",
    ]


@pytest.mark.case(42)
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_misspelled_keys_in_every_subtree(prefix):
    keys = ("optim.warmpu_steps", "train.micro_batchsize", "grid.tensr", "loging.every", "steps")
    faults = faults_of(*(f"{prefix}{key}=4" for key in keys))
    assert len(faults) == len(keys)
    for key, fault in zip(keys, faults, strict=True):
        assert fault.startswith(f"{prefix}{key}=4: there is no option {key}; nearest: ")


FAULTS = [
    ("train.steps=abc", "train.steps=abc: needs an int"),
    ("train.steps=0", "train.steps=0: must be at least 1"),
    ("train.steps=null", "train.steps=null: needs an int"),
    ("train.steps=1.5", "nearest: 2"),
    ("grid.tensor=two", "grid.tensor=two: needs an int"),
    ("grid.sequence_parallel=yes", "needs true or false"),
    ("optimizer.betas=[0.9,1.0]", "optimizer.betas=[0.9,1.0]: must be below 1"),
    ("optimizer.lr=nan", "needs a float"),
    ("data.held_out=1", "data.held_out=1: must be below 1"),
    ("recompute.mode=fulll", "nearest: full"),
    ("model=llama3_8", "model=llama3_8: no such file in model/; nearest: llama3_8b"),
    ("precision.mode=fp8", "not one of auto, fp32, bf16, fp16, fp64; nearest: fp64"),
    ("precision.loss_scale=0.5", "precision.loss_scale=0.5: must be at least 1"),
    ("grid.context=2", "context parallelism is not built yet"),
    ("data_parallel.zero=4", "data_parallel.zero=4: not one of 0, 1, 2, 3; nearest: 3"),
    ("data_parallel.reduce=always", "not one of each, last"),
    ("data_parallel.shard_size=0", "data_parallel.shard_size=0: must be at least 1"),
    ("pipeline=zb_h3", "pipeline=zb_h3: no such file in pipeline/; "),
    ("pipeline.layers_per_stage=4", "needs a list of int or null; nearest: [4]"),
    ("pipeline.layers_per_stage=[0]", "must be at least 1"),
    ("pipeline.chunks=0", "pipeline.chunks=0: must be at least 1"),
    ("train=5", "train=5: no such file in train/"),
    ("train={steps: 5}", "name one file of train/"),
    ("first_run", "first_run: write experiment=first_run"),
    ("llama3_8b", "llama3_8b: write model=llama3_8b"),
    ("lr", "lr: write key=value; nearest: optimizer.lr=..."),
    ("train.steps", "train.steps: write key=value, as in train.steps=..."),
    ("~train.steps", "~train.steps: an option cannot be taken away"),
    ("grid.tensor=1,2", "several values are a sweep; add -m"),
    ("train.steps=range(1,4)", "several values are a sweep; add -m"),
    ("train.steps=[1", "train.steps=[1: cannot be read"),
    ("hydra.run.dir=x", "Hydra's own settings serve a sweep"),
    ("model@other=tiny", "model=tiny"),
    ("=", "there is no option"),
    ("", "write key=value"),
]


def test_each_fault_has_its_words_and_all_are_told():
    faults = faults_of(*(override for override, _ in FAULTS))
    assert len(faults) == len(FAULTS)
    for (override, words), fault in zip(FAULTS, faults, strict=True):
        assert words in fault, override


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("plugins=mine", "plugins=[mine]: no module 'mine'"),
        ("data.path=", "data.path= is empty"),
        ("model.build=nothing", "write MODULE:FUNCTION"),
        ("data.tokenizer=/no/such.json", "no such file; give bytes or"),
    ],
)
def test_faults_outside_the_schema(override, words):
    around = dataclasses.replace(AROUND, data_fault=Surroundings().data_fault)
    with pytest.raises(Refusal) as caught:
        compose([override], surroundings=around)
    (fault,) = caught.value.violations
    assert words in fault


def test_rules_are_told_beside_misspellings():
    faults = faults_of("experiment=first_run", "train.global_batch_size=15", "grid.tenzor=16", "optimizer.lr=-1")
    assert len(faults) == 4
    assert "more tensor ranks than model.num_attention_heads=8" in faults[2] and "15 is not a multiple" in faults[3]


def test_rules_do_not_judge_what_is_refused_already():
    assert faults_of("train.global_batch_size=-3") == ["train.global_batch_size=-3: must be at least 1"]


# ---------------------------------------------------------------- files of the user's own
def test_own_files_come_first(folder):
    folder("model/tiny.yaml", "num_layers: 3\n")
    folder("model/mine.yaml", "num_layers: 5\n")
    assert plan_of("model=tiny").model.num_layers == 3
    assert plan_of("model=mine").model.num_layers == 5
    assert plan_of("model=small").model.num_layers == 8


def test_another_projects_config_yaml_is_left_alone(folder):
    folder("config.yaml", "defaults: [nothing]\nmodel: {units: 3}\n")
    folder("model/mine.yaml", "num_layers: 5\n")
    assert plan_of("model=mine").model.num_layers == 5


def test_conf_without_our_groups_is_left_alone(folder):
    folder("config.yaml", "defaults: [nothing]\n")
    folder("server/a.yaml", "x: 1\n")
    assert plan_of().model.num_layers == 4


def test_config_dir_comes_before_conf(folder, tmp_path):
    folder("model/mine.yaml", "num_layers: 5\n")
    folder("../o,t h'er/model/mine.yaml", "num_layers: 6\n")
    folder("../o,t h'er/train/mine.yaml", "steps: 9\n")
    other = str(tmp_path / "o,t h'er")
    assert plan_of("model=mine", "train=mine", config_directories=[other]).model.num_layers == 6
    folder("../first/data/mine.yaml", "held_out: 0.5\n")
    plan = plan_of("model=mine", "train=mine", "data=mine", config_directories=[str(tmp_path / "first"), other])
    assert (plan.model.num_layers, plan.train.steps, plan.data.held_out) == (6, 9, 0.5)
    assert "no such folder" in faults_of(config_directories=["/no/such"])[0]


@pytest.mark.case(42)
def test_misspellings_in_files_are_found(folder):
    folder("experiment/mine.yaml", "# @package _global_\noptimizer: {lrr: 1}\ntrain: {steps: many}\n")
    folder("model/mine.yaml", "num_layer: 5\nrope_scaling: {typ: linear}\n")
    faults = faults_of("experiment=mine", "model=mine")
    assert sorted(line.rpartition(" (in ")[2] for line in faults[:3]) == [
        "experiment/mine.yaml)", "experiment/mine.yaml)", "model/mine.yaml)",
    ]  # fmt: skip
    text = "\n".join(faults)
    assert "optimizer.lrr: there is no option optimizer.lrr; nearest: optimizer.lr" in text
    assert "train.steps=many: needs an int" in text and "nearest: model.num_layers" in text
    assert "rope_scaling" in text


@pytest.mark.parametrize(
    "content",
    [
        "a: [1\n",
        "- 1\n- 2\n",
        "defaults: [/nothing/here]\n",
        "num_layers: ${oc.env:NO_SUCH_NAME}\n",
        "x: !!python/object:os.system {}\n",
    ],
)
def test_files_that_cannot_be_combined(folder, content):
    folder("model/bad.yaml", content)
    (fault,) = faults_of("model=bad")
    assert len(fault) < 600


def test_composition_leaves_nothing_behind(folder, tmp_path):
    plan_of("experiment=first_run")
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- a run that goes on
def stored(*overrides):
    return yaml.safe_load(yaml.safe_dump(plan_to_dict(plan_of(*overrides))))


def test_going_on_without_words_changes_nothing():
    given = ("experiment=first_run", "train.steps=70", "optimizer=sgd", "grid.tensor=1")
    assert plan_of(stored=stored(*given)) == plan_of(*given)


def test_the_same_files_again_change_nothing():
    given = ("experiment=first_run", "train.steps=70", "optimizer=sgd", "optimizer.lr=0.5")
    again = plan_of("experiment=first_run", "optimizer=sgd", "model=first_run", stored=stored(*given))
    assert again == plan_of(*given)


def test_values_go_on_top():
    plan = plan_of("grid.tensor=1", "train.stop_after=30", stored=stored("experiment=first_run", "train.steps=70"))
    assert (plan.grid.tensor, plan.train.stop_after, plan.train.steps, plan.train.sequence_length) == (1, 30, 70, 128)


def test_another_file_replaces_its_section():
    before = stored("experiment=first_run", "optimizer.lr=0.5", "train.steps=70")
    plan = plan_of("optimizer=sgd", stored=before)
    assert plan.optimizer == plan_of("optimizer=sgd").optimizer and plan.train.steps == 70
    assert plan.choices["optimizer"] == "sgd" and plan.choices["experiment"] == "first_run"


def test_another_experiment_changes_what_it_sets(folder):
    folder("experiment/longer.yaml", "# @package _global_\ntrain: {steps: 999}\n")
    plan = plan_of("experiment=longer", stored=stored("experiment=first_run", "optimizer.lr=0.5"))
    assert plan.train.steps == 999 and plan.optimizer.lr == 0.5 and plan.model.num_layers == 12


def test_a_stored_plan_is_checked_too():
    before = stored("experiment=first_run")
    before["train"]["stepz"] = 3
    assert "nearest: train.steps" in faults_of(stored=before)[0]


def test_options_that_came_later_take_their_defaults():
    before = stored("experiment=first_run")
    del before["train"]["max_nonfinite"], before["logging"]
    plan = plan_of("train.max_nonfinite=3", "logging.every=5", stored=before)
    assert (plan.train.max_nonfinite, plan.logging.every, plan.train.steps) == (3, 5, 80)


# ---------------------------------------------------------------- sweeps
def test_each_value_of_a_sweep_is_checked():
    checked = check_request(["grid.tensor=1,2,x", "model=tiny,small,tny", "optimizer.lr=1,-1"], sweep=True).checked
    assert len(checked.violations) == 3


@pytest.mark.parametrize(
    "override", ["train.seed=1,2", "train.seed=choice(1,2)", "train.steps=range(1,5)", "data.path=/a b,/c"]
)
def test_sweeps_that_are_right(override):
    assert check_request([override], sweep=True).checked.violations == []


def test_refusing_and_composing_need_no_torch():
    """A refusal comes in half a second, not after the seconds that torch takes to load."""
    program = (
        "import sys\n"
        "from gridtron.tools.cli import main\n"
        "assert main(['train', 'experiment=first_run', 'grid.tenzor=2']) == 2\n"
        "assert main(['train', 'experiment=first_run', '--cfg', 'job']) == 0\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
