"""Which kernels run is decided from a value of the machine's capabilities; what cannot run is refused by name."""

import itertools

import pytest

from gridtron.conf.compose import Refusal, compose
from gridtron.conf.rules import Surroundings
from gridtron.core.capabilities import Capabilities
from gridtron.core.kernels.config import AVAILABLE, BACKENDS, KernelsConfig, backend_fault, choose, resolve


def machine(devices=0, triton=None, apex=None, interpreted=False):
    return Capabilities(4, ("NVIDIA H200",) * devices, devices > 0, devices > 0, triton, apex, interpreted)


BARE = machine()
WHOLE = machine(1, "3.7.1", "nvidia")
MACHINES = [
    machine(*parts) for parts in itertools.product((0, 1), (None, "3.7.1"), (None, "other", "nvidia"), (False, True))
]


def around(found):
    return Surroundings(
        cores=64,
        devices=len(found.cuda_devices),
        libraries=found,
        data_fault=lambda config: None,
        folder_fault=lambda folder: None,
    )


def refused(found, *words):
    with pytest.raises(Refusal) as caught:
        compose(["model=tiny", *words], surroundings=around(found))
    return caught.value.violations


@pytest.mark.parametrize(
    ("found", "words", "reason"),
    [
        (BARE, "kernels.backend=triton", "Triton is not installed"),
        (machine(0, "3.7.1"), "kernels.backend=triton", "no CUDA device"),
        (machine(1), "kernels.adamw=triton", "Triton is not installed"),
        (BARE, "kernels.backend=apex", "NVIDIA apex is not installed"),
        (machine(1, None, "other"), "kernels.backend=apex", "the apex that is installed is not NVIDIA's"),
        (machine(0, None, "nvidia"), "kernels.rms_norm=apex", "no CUDA device"),
    ],
)
def test_what_cannot_run_is_refused(found, words, reason):
    """In one line, whatever the number of operations that it concerns."""
    assert refused(found, words) == [f"{words}: {reason}; nearest: {words.partition('=')[0]}=auto"]


def test_each_operation_is_refused_by_its_own_name():
    (line,) = refused(machine(0, "3.7.1"), "kernels.rope=triton", "kernels.adamw=apex")
    assert line.split("; ") == [
        "kernels.rope=triton: no CUDA device", "nearest: kernels.rope=auto",
        "kernels.adamw=apex: NVIDIA apex is not installed", "nearest: kernels.adamw=auto",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("kernels.backend=tritn", "triton"),
        ("kernels.swiglu=apex", "triton"),  # apex has none
        ("kernels.rms_nrom=triton", "kernels.rms_norm"),
        ("kernels.chunked_loss=maybe", "kernels.chunked_loss"),
        ("kernels.use_triton=true", "kernels."),
    ],
)
def test_unknown_values_and_keys_have_a_nearest(words, message):
    (line,) = refused(WHOLE, words)
    assert words.partition("=")[0] in line and message in line


@pytest.mark.parametrize("words", ["kernels.backend=triton", "kernels.backend=apex", "kernels.swiglu=triton", ""])
def test_a_whole_machine_takes_everything(words):
    plan = compose(["model=tiny", *([words] if words else [])], surroundings=around(WHOLE))
    chosen = resolve(plan.kernels, WHOLE)
    assert all(chosen.of(name) in AVAILABLE[name] for name in AVAILABLE)


def test_the_interpreter_is_taken_by_name_only():
    here = machine(0, "3.7.1", None, True)
    assert compose(["model=tiny", "kernels.backend=triton"], surroundings=around(here)).kernels.backend == "triton"
    assert choose(KernelsConfig(), "rope", here).backend == "torch"
    assert choose(KernelsConfig("triton"), "rope", here).fault is None


@pytest.mark.parametrize("found", MACHINES)
def test_what_is_chosen_on_every_machine(found):
    """What auto takes is the first that can run; what is asked for is taken, with its fault where there is one."""
    able = {name for name in ("triton", "apex", "torch") if backend_fault(name, found) is None}
    able -= {"triton"} if found.triton_interpreted else set()
    for operation, names in AVAILABLE.items():
        choice = choose(KernelsConfig(), operation, found)
        assert choice.fault is None and choice.reason.startswith("auto")
        assert choice.backend == next(name for name in names if name in able)
        skipped = names[: names.index(choice.backend)]
        assert all(f"no {name}: " in choice.reason for name in skipped)
        for backend in BACKENDS[1:]:
            asked = choose(KernelsConfig(backend), operation, found)
            assert asked.backend == (backend if backend in names else "torch")
            assert (asked.fault is None) == (backend_fault(asked.backend, found) is None)
            assert f"kernels.backend={backend}" in asked.reason
            assert ("which has no" in asked.reason) == (backend not in names)
        own = KernelsConfig("triton", **{operation: "torch"})
        assert choose(own, operation, found).backend == "torch" and choose(own, operation, found).fault is None


@pytest.mark.parametrize("found", MACHINES)
def test_resolved_options_name_every_operation_and_stay(found):
    for backend in BACKENDS:
        config = KernelsConfig(backend, rope="torch", chunked_loss=True)
        named = resolve(config, found)
        assert all(named.of(name) in AVAILABLE[name] for name in AVAILABLE)
        assert named.rope == "torch" and named.chunked_loss
        assert resolve(named, found) == named
        assert resolve(named, BARE) == named  # elsewhere too: nothing is left to choose


def test_without_a_device_torch_takes_everything():
    named = resolve(KernelsConfig(), BARE)
    assert {named.of(name) for name in AVAILABLE} == {"torch"}
    named = resolve(KernelsConfig(), machine(1, None, "nvidia"))
    assert {name for name in AVAILABLE if named.of(name) == "apex"} == {
        "rms_norm", "layer_norm", "scaled_masked_softmax", "adamw",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["kernels.rope=torch", "model.position=learned"], "model.position=learned"),
        (["kernels.layer_norm=torch"], "model.normalization=rms_norm"),
        (["kernels.bias_gelu=torch"], "model.activation=swiglu"),
        (["kernels.dropout_add=torch"], "model.dropout=0"),
        (["kernels.adamw=torch", "optimizer=sgd"], "optimizer=sgd"),
        (["kernels.linear_cross_entropy=torch"], "kernels.chunked_loss=false"),
        (["kernels.cross_entropy=torch", "kernels.chunked_loss=true"], "kernels.chunked_loss=true"),
        (["kernels.rms_norm=torch", "model.build=torch.nn:Identity"], "a model of your own"),
        (["kernels.chunked_loss=true", "model.build=torch.nn:Identity"], "a model of your own"),
    ],
)
def test_what_has_no_effect_is_refused(words, reason):
    lines = [line for line in refused(BARE, *words) if line.startswith(words[0])]
    assert len(lines) == 1 and f"has no effect with {reason}" in lines[0] and lines[0].endswith("leave it out")


def test_what_is_used_may_be_named():
    used = ["kernels.rms_norm=torch", "kernels.rope=auto", "kernels.swiglu=torch", "kernels.cross_entropy=torch"]
    assert compose(["model=tiny", *used, "kernels.adamw=torch"], surroundings=around(BARE)).kernels.rope == "auto"
