"""bench gpu on a CPU: its formulae, its flow in tiny sizes under a made-up clock, its refusals. No timed claim."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted import interpreted

from gridtron.core import capabilities
from gridtron.core.capabilities import Capabilities, find_capabilities
from gridtron.core.kernels.config import AVAILABLE
from gridtron.tools.bench import gpu, gpu_bytes
from gridtron.tools.bench.cli import BenchOptions, main
from gridtron.tools.bench.gpu_adamw import shapes_of, updates
from gridtron.tools.bench.gpu_clock import Budget, device_measure
from gridtron.tools.bench.gpu_kernels import TINY, Sizes, operations, own_inputs, results_of
from gridtron.tools.bench.gpu_step import LARGE
from gridtron.tools.bench.plain import SHAPES

CPU = torch.device("cpu")
INTERPRETER = Capabilities(1, (), False, False, "3.7.1", None, True)


# ---------------------------------------------------------------- formulae
def test_bytes_by_hand():
    """bf16, 8192 x 4096: one tensor is 64 MiB."""
    mebi = 2**20
    assert gpu_bytes.rms_norm(8192, 4096, 2) == (128 * mebi + 8192 + 32768, 320 * mebi + 3 * 8192 + 2 * 32768)
    assert gpu_bytes.layer_norm(8192, 4096, 2) == (128 * mebi + 2 * 8192 + 65536, 320 * mebi + 5 * 8192 + 2 * 65536)
    assert gpu_bytes.swiglu(8192, 4096, 2) == (192 * mebi, 512 * mebi)
    assert gpu_bytes.bias_gelu(8192, 4096, 2) == (128 * mebi + 8192, 320 * mebi + 3 * 8192)
    assert gpu_bytes.dropout_add(8192, 4096, 2) == (192 * mebi, 320 * mebi)
    assert gpu_bytes.rope(4, 32, 2048, 128, 2) == (256 * mebi + mebi // 2, 512 * mebi + mebi)
    assert gpu_bytes.cross_entropy(8, 16, 2) == (256 + 8 * 20, 768 + 16 * 20)
    # Of a square of four, ten are past or present.
    assert gpu_bytes.scaled_masked_softmax(1, 1, 4, 2) == (2 * (10 + 16), 2 * (30 + 32))
    assert gpu_bytes.adamw(10, 2) == 10 * (4 + 3 * 8 + 2)
    assert gpu_bytes.linear_cross_entropy_flops(2, 3, 5) == (60, 180)


def test_no_forward_pass_moves_less_than_its_inputs_and_results():
    """What autograd holds and what comes out, against the formulae: statistics and masks apart."""
    for operation in operations(TINY, CPU, torch.float32):
        if operation.bytes is None:
            continue
        given = operation.inputs()
        leaves = [value for value in given.values() if isinstance(value, torch.Tensor) and value.requires_grad]
        results = results_of(operation.plain, given)
        least = sum(tensor.nbytes for tensor in (*leaves, *results) if tensor.ndim)
        if operation.name == "scaled_masked_softmax":
            least -= leaves[0].nbytes // 2
        assert least <= operation.bytes.forward <= 1.5 * least, operation.name
        assert operation.bytes.both > 1.5 * operation.bytes.forward


def test_the_large_model_has_a_billion_parameters():
    count = sum(torch.Size(shape).numel() for shape in shapes_of(LARGE))
    assert 1.3e9 < count < 1.4e9
    assert {one.name for one in operations(TINY, CPU, torch.float32)} | {"adamw"} == set(AVAILABLE)
    assert Sizes().rows == 8192 and Sizes().hidden == 4096


# ---------------------------------------------------------------- the flow
def every(contenders):
    """Runs each once; the first takes a millisecond, the next two, and so on."""
    for run in contenders.values():
        run()
    return {name: 1e-3 * (number + 1) for number, name in enumerate(contenders)}


def machine(**changes):
    return replace(
        gpu.Machine(CPU, torch.float32, INTERPRETER, every, lambda function: function, "eager", 2**10), **changes
    )


OPTIONS = BenchOptions("tiny", pairs=4, warmup=1, peers="none")


@pytest.fixture(scope="module")
def figures():
    pytest.importorskip("triton")
    with interpreted():
        return gpu.measure_all(machine(), OPTIONS, TINY, SHAPES["tiny"], Budget(1000))


def test_every_operation_has_its_rows(figures):
    rows = figures["kernels"]
    assert {row["operation"] for row in rows} == set(AVAILABLE)
    assert not any(row.get("failed") for row in rows)
    for row in rows:
        assert row["pass"] in ("forward", "forward and backward", "update")
        names = ["triton", "torch"] if row["operation"] == "adamw" else ["triton", "torch", "torch.compile"]
        assert [name for name in row["contenders"] if name != "Liger"] == names
        assert (row["target"] is None) == (row["operation"] not in gpu.BOUND_BY_MEMORY)
        ours = row["contenders"]["triton"]
        if row["bytes"]:
            assert ours["bytes_per_second"] == row["bytes"] / 1e-3
            assert ours["share_of_copy"] == pytest.approx(ours["bytes_per_second"] / figures["copy_bytes_per_second"])
            assert row["holds"] == (ours["share_of_copy"] >= 0.9 if row["target"] else None)
        assert all(value < 1e-5 for value in row.get("differences", {}).values()), row["operation"]
    assert figures["copy_bytes_per_second"] == 2 * 2**10 / 1e-3


def test_the_step_has_its_rows(figures):
    step = figures["step"]
    assert not [row["failed"] for row in step["contenders"].values() if "failed" in row]
    assert list(step["contenders"])[:2] == ["gridtron", "plain module, compiled"]
    assert {"gridtron, compiled layers"} < set(step["contenders"])
    assert step["equal_losses"] and step["peak_flops"] is None and step["holds"] is None
    for row in step["contenders"].values():
        assert row["steps"] == 2 and row["mfu"] is None and len(row["losses"]) == 2
        tokens = step["shape"]["batch"] * step["shape"]["sequence"]
        assert row["tokens_per_second"] == tokens / row["seconds"]
    # Equal weights, tokens and optimizers: the same after three steps too.
    lasts = [row["losses"][1] for row in step["contenders"].values()]
    assert max(lasts) - min(lasts) < 1e-4


def test_figures_are_json_and_shown(figures, capsys):
    assert json.loads(json.dumps(figures)).keys() == figures.keys()
    gpu.show(figures)
    shown = capsys.readouterr().out
    assert "rms_norm" in shown and "gridtron, compiled layers" in shown and "missing: NVIDIA apex" in shown


def test_transformers_starts_from_the_same_weights():
    pytest.importorskip("transformers")
    from gridtron.tools.bench.contenders import huggingface_model, huggingface_state
    from gridtron.tools.bench.plain import plain_model, tokens_of

    shape = SHAPES["tiny"]
    for dtype in (torch.float32, torch.bfloat16):
        model, plain = huggingface_model(shape, dtype), plain_model(shape).to(dtype)
        model.load_state_dict(huggingface_state(plain, shape))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
        tokens, _ = tokens_of(shape, 0)
        ours, theirs = plain(tokens).float(), model(tokens).logits.float()
        assert (ours - theirs).norm() < (1e-5 if dtype == torch.float32 else 3e-2) * theirs.norm()


def test_without_time_everything_is_named():
    clock = iter(range(0, 10**6, 100))
    rows = gpu.measure_kernels(machine(), TINY, 1.0, Budget(50, lambda: next(clock)))
    assert rows and all(row["skipped"] == "no time was left" for row in rows)
    (row,) = gpu.measure_adamw(machine(), SHAPES["tiny"], 1.0, Budget(50, lambda: next(clock)))
    assert row["skipped"]


def test_a_contender_that_fails_is_named():
    def broken(function):
        raise_it = {"times": 0}

        def run(given):
            raise_it["times"] += 1
            raise RuntimeError("no such kernel\nand more")

        return run

    bare = replace(INTERPRETER, triton=None)
    rows = gpu.measure_kernels(machine(found=bare, compiler=broken), TINY, 1.0, Budget(1000))
    for row in rows:
        assert row["failed"] == {"torch.compile": "RuntimeError: no such kernel"}
        assert next(iter(row["contenders"])) == "torch" and row["holds"] is None


def test_updates_are_of_all_parameters():
    shapes = shapes_of(SHAPES["tiny"])
    (update,) = updates(shapes, CPU, torch.bfloat16, replace(INTERPRETER, triton=None)).values()
    update()
    given = {"x": torch.ones(2, requires_grad=True), "count": 3}
    own = own_inputs(given)
    assert own["x"].requires_grad and own["x"] is not given["x"] and own["count"] == 3


LIGER = """
import torch
import torch.nn.functional as F

def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    assert not in_place
    return F.rms_norm(X, W.shape, W, eps)

def liger_layer_norm(X, W, B, eps):
    return F.layer_norm(X, W.shape, W, B, eps)

def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    assert cos.shape == sin.shape == (1, q.shape[2], q.shape[3])
    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin
    return turned(q), turned(k), cos, sin

def liger_swiglu(a, b):
    return F.silu(a) * b

def liger_cross_entropy(input, target, ignore_index=-100, reduction="mean"):
    return F.cross_entropy(input, target, ignore_index=ignore_index, reduction=reduction)

def liger_fused_linear_cross_entropy(input, weight, target, bias=None, ignore_index=-100, reduction="mean"):
    return F.cross_entropy(F.linear(input, weight, bias), target, ignore_index=ignore_index, reduction=reduction)
"""
"""A stand-in with the published names and orders of arguments."""


def test_liger_is_called_as_it_is_published(tmp_path, monkeypatch):
    folder = tmp_path / "liger_kernel" / "transformers"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").write_text("")
    (folder / "functional.py").write_text(LIGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    bare = replace(INTERPRETER, triton=None)
    rows = gpu.measure_kernels(machine(found=bare), TINY, 1.0, Budget(1000))
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)
    has = {row["operation"] for row in rows if "Liger" in row["contenders"]}
    assert has == {"rms_norm", "layer_norm", "rope", "swiglu", "cross_entropy", "linear_cross_entropy"}
    assert not any(row["failed"] for row in rows)
    assert all(row["differences"]["Liger"] < 1e-6 for row in rows if row["operation"] in has)


class Event:
    """A device's event on a clock of its own: each run takes as many milliseconds as it says."""

    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.clock

    def elapsed_time(self, other):
        return other.at - self.at


def test_contenders_run_in_turn(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(4, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    order = []

    def work(name, milliseconds):
        def run():
            order.append(name)
            Event.clock += milliseconds

        return run

    works = {"a": work("a", 1.0), "b": work("b", 2.0), "c": work("c", 4.0)}
    assert device_measure(4, 1, Budget(1000))(works) == pytest.approx({"a": 1e-3, "b": 2e-3, "c": 4e-3})
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"
    order.clear()
    clock = iter(range(0, 1000, 30))
    # One round is always counted.
    assert set(device_measure(9, 0, Budget(20, lambda: next(clock)))(works)) == {"a", "b", "c"}
    assert "".join(order) == "abc"


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuda_devices": ()}, "bench gpu: this machine has no CUDA device"),
        ({"cuda_devices": ("NVIDIA H200",), "triton": None}, "bench gpu: Triton is not installed"),
    ],
)
def test_refused_before_anything_runs(changes, message, monkeypatch, tmp_path, capsys):
    found = replace(find_capabilities(), **changes)
    monkeypatch.setattr(capabilities, "find_capabilities", lambda environment=None: found)
    out = tmp_path / "gpu.json"
    assert main(["gpu", f"out={out}"]) == 2
    assert message in capsys.readouterr().err and not out.exists()
    assert main(["gpu", "chart=a.svg"]) == 2
    assert "only bench step draws a chart" in capsys.readouterr().err


def test_make_has_it():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "gridtron bench gpu out=gpu.json" in makefile.partition("\nbench-gpu:")[2].partition("\n\n")[0]
