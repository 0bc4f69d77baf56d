"""``gridtron checkpoint``: what each word prints and writes, its exit codes, and the memory it takes."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from checkpoint_files import EXTRA, RANKS, small_checkpoint, small_layout, small_tensors, write_by_hand

from gridtron.core.checkpoint.whole import write_checkpoint
from gridtron.core.files import Files
from gridtron.tools.checkpoint.opening import open_checkpoint
from gridtron.tools.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command; its exit code, what it printed, and what it said on standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["checkpoint", *words])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return code, printed.out, printed.err

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with one checkpoint."""
    small_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000010")
    return tmp_path / "run"


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / "step-00000010"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


# ---------------------------------------------------------------- words
def test_alone_it_lists_the_four(command: Command) -> None:
    code, out, _ = command()
    assert code == 2
    assert all(f"gridtron checkpoint {word}: " in out for word in ("inspect", "verify", "diff", "export"))
    assert "repair=" in out and "tolerance=" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["insect"], "nearest: inspect; there are inspect, verify, diff, export"),
        (["path=x"], "a word comes first"),
        (["inspect"], "path=PATH is missing"),
        (["inspect", "path=nothing"], "nothing holds no complete checkpoint (there is no such folder)"),
        (["inspect", "path=."], "empty holds no complete checkpoint;"),
        (["inspect", "pth=x"], "nearest: path"),
        (["inspect", "path=\0x"], "x00x holds no complete checkpoint"),
        (["inspect", "-m", "path=."], "takes key=value only"),
        (["diff", "path={run}"], "other=PATH is missing"),
        (["diff", "path={run}", "other={run}", "tolerance=-1"], "must be at least 0"),
        (["verify", "path={run}", "repair=maybe"], "needs true or false"),
        (["export", "path={run}"], "target=FILE.safetensors is missing"),
        (["export", "path={run}", "target=a.txt"], "nearest: a.txt.safetensors"),
        (["export", "path={run}", "target=no/such/a.safetensors"], "there is no folder"),
        (["export", "path={run}", "target={run}/taken.safetensors"], "it exists"),
        (["export", "path={run}", "target={checkpoint}/a.safetensors"], "among the checkpoint's files"),
        (["export", "path={run}", "target=a.safetensors", "dtype=fp8"], "not one of null, fp32, bf16, fp16, fp64"),
        (["export", "path={run}", "target=a.safetensors", "what=all", "weights=main"], "leave it out"),
        (["inspect", "path={run}", "names=*.q.*"], "none of"),
        (["inspect", "path={run}", "out={checkpoint}/a.json"], "among the checkpoint's files"),
        (["inspect", "path={run}", "out=no/such/a.json"], "there is no folder"),
        (["inspect", "path={run}", "out=."], "it is a folder"),
    ],
)
def test_wrong_requests(
    words: list[str], message: str, command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "taken.safetensors").write_bytes(b"mine")
    (run / "empty").mkdir()
    monkeypatch.chdir(run / "empty")
    before = sorted(str(path) for path in run.rglob("*"))
    filled = [word.replace("{run}", str(run)).replace("{checkpoint}", str(checkpoint_of(run))) for word in words]
    code, out, err = command(*filled)
    assert code == 2 and out == "" and message in err and len(err.splitlines()) < 12
    assert sorted(str(path) for path in run.rglob("*")) == before
    assert (run / "taken.safetensors").read_bytes() == b"mine"


# ---------------------------------------------------------------- inspect
def test_inspect(command: Command, run: Path, tmp_path: Path) -> None:
    code, out, err = command("inspect", f"path={run}", f"out={tmp_path}/report.json")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["step", "10"] in lines and ["tokens", "1,234,567"] in lines and ["model.num_layers", "2"] in lines
    assert ["main", "weights", "4", "108", "432", "float32"] in lines
    assert ["parameters", "4", "108", "216", "bfloat16"] in lines
    name = "parameters/blocks.1.up.weight"
    assert [name, "bfloat16", "8x6", "2", "+", "2", "copies", RANKS[0], "and", "1", "more"] in lines
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["bytes"] == sum((checkpoint_of(run) / file).stat().st_size for file in RANKS)
    assert report["progress"] == EXTRA["progress"]
    assert report["tensors"][name]["files"] == list(RANKS[:2]) and report["tensors"][name]["bytes"] == 96
    code, out, _ = command("inspect", f"path={run}", "names=*.0.up*")
    assert code == 0 and "blocks.0.up.weight/main" in out and "blocks.1" not in out and "norm" not in out


def test_inspect_puts_layers_together(command: Command, tmp_path: Path) -> None:
    names = {f"parameters/blocks.{n}.up.weight": (torch.float32, (2, 3 + (n == 7))) for n in range(60)}
    write_checkpoint(tmp_path / "step-00000001", names, lambda name: torch.zeros(names[name][1]), {})
    _, out, _ = command("inspect", f"path={tmp_path}")
    assert "parameters/blocks.*.up.weight x 59" in out and "parameters/blocks.7.up.weight " in out
    assert len(out.splitlines()) < 20


def test_inspect_reads_the_manifest_alone_and_tells_what_it_sees(command: Command, run: Path) -> None:
    (checkpoint_of(run) / RANKS[0]).write_bytes(b"x")
    (checkpoint_of(run) / RANKS[1]).unlink()
    code, out, _ = command("inspect", f"path={checkpoint_of(run)}")
    assert code == 0 and "has 1 bytes: damaged" in out and "missing" in out


def test_newer_ones_that_were_skipped_are_told(command: Command, run: Path) -> None:
    shutil.copytree(checkpoint_of(run), run / "checkpoints" / "step-00000020")
    (run / "checkpoints" / "step-00000020" / RANKS[1]).unlink()
    code, out, _ = command("inspect", f"path={run}")
    assert code == 0 and "step-00000020: " in out and "rank-00001.safetensors is missing" in out
    assert "step-00000010" in out.splitlines()[0]
    # To verify is to ask about the newest, whatever it is like.
    code, out, _ = command("verify", f"path={run}")
    assert code == 1 and "step-00000020" in out.splitlines()[0] and "rank-00001" in out


# ---------------------------------------------------------------- verify
def test_verify_and_repair(command: Command, run: Path, tmp_path: Path) -> None:
    folder = checkpoint_of(run)
    code, out, err = command("verify", f"path={run}")
    assert code == 0 and out.startswith("sound: ") and err == ""
    before = {file: (folder / file).read_bytes() for file in RANKS}
    flip(folder / RANKS[0], -1)
    os.truncate(folder / RANKS[1], 700)
    report = f"out={tmp_path}/report.json"
    code, out, _ = command("verify", f"path={run}", report)
    assert code == 1 and out.startswith("damaged: ") and len(out.splitlines()) < 12
    assert RANKS[0] in out and "parameters/blocks.1.up.weight" in out and "bytes and should have" in out
    found = json.loads((tmp_path / "report.json").read_text())
    assert not found["sound"] and found["files"][RANKS[2]] == {"fault": None, "damaged": []}
    (block,) = found["files"][RANKS[0]]["damaged"]
    assert block["first"] < len(before[RANKS[0]]) <= block["stop"]
    code, out, _ = command("verify", f"path={run}", "repair=true", report)
    assert code == 0 and out.count("repaired: ") == 2 and "sound: " in out
    assert json.loads((tmp_path / "report.json").read_text())["repaired"] == list(RANKS[:2])
    assert {file: (folder / file).read_bytes() for file in RANKS} == before
    assert command("verify", f"path={run}")[0] == 0


def test_what_cannot_be_repaired_is_named_and_left(command: Command, run: Path) -> None:
    folder = checkpoint_of(run)
    for file in RANKS:
        flip(folder / file, -1)
    (folder / RANKS[1]).unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, out, _ = command("verify", f"path={run}", "repair=true")
    assert code == 1 and "was left as it is" in out and "is sound in no other file" in out
    assert len(out.splitlines()) < 12
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != RANKS[0]} == {
        name: content for name, content in before.items() if name != RANKS[0]
    }


def test_a_damaged_manifest_is_damage(command: Command, run: Path) -> None:
    flip(checkpoint_of(run) / "manifest.json", 500)
    code, out, _ = command("verify", f"path={checkpoint_of(run)}", "repair=true")
    assert code == 1 and "its checksum differs" in out
    assert command("inspect", f"path={checkpoint_of(run)}")[0] == 2


# ---------------------------------------------------------------- diff
def changed(folder: Path, changes: dict[str, Any], extra: dict[str, Any] = EXTRA) -> Path:
    """The small checkpoint on another grid (no tensor is cut), with other tensors; None leaves one out."""
    tensors = {name: tensor for name, tensor in (small_tensors() | changes).items() if tensor is not None}
    layout = {name: [(((0,) * tensor.dim(), tuple(tensor.shape)), [RANKS[0]])] for name, tensor in tensors.items()}
    return write_by_hand(folder, tensors, layout, extra)


def test_the_same_on_another_grid_is_identical(command: Command, run: Path, tmp_path: Path) -> None:
    other = changed(tmp_path / "other" / "step-00000010", {})
    code, out, _ = command("diff", f"path={run}", f"other={other}")
    assert code == 0 and out.startswith("identical: 14 tensors")


def test_every_kind_of_difference(command: Command, run: Path, tmp_path: Path) -> None:
    first, second = "parameters/blocks.0.up.weight", "optimizer/blocks.1.up.weight/exp_avg"
    tensors = small_tensors()
    near, far = tensors[first].clone(), tensors[second].clone()
    near[3, 3] += 0.5
    far[0, 0], far[0, 1], far[1, 0] = math.nan, math.inf, far[1, 0] * (1 + 1e-6)
    wider = tensors["parameters/blocks.0.norm.weight"].double()
    changes = {
        first: near,
        second: far,
        "parameters/blocks.0.norm.weight": wider,
        "parameters/blocks.1.norm.weight": torch.zeros(7),
        "optimizer/blocks.1.norm.weight/main": None,
        "stranger": torch.zeros(3),
    }
    other = changed(tmp_path / "other", changes, {"progress": {"step": 11, "position": 80, "tokens": 1234567}})
    code, out, _ = command("diff", f"path={run}", f"other={other}", f"out={tmp_path}/report.json")
    assert code == 1
    assert "step: 10 there, 11 in the other" in out and "stranger: only in" in out
    assert "optimizer/blocks.1.norm.weight/main: only in" in out
    assert "parameters/blocks.1.norm.weight: shape [6], [7] in the other" in out
    assert "parameters/blocks.0.norm.weight: bfloat16, float64 in the other" in out
    assert out.splitlines()[-1].startswith("different: 2 of 12 tensors differ")
    report = json.loads((tmp_path / "report.json").read_text())
    worst, next_one = report["differences"]
    assert (worst["name"], worst["differing"], worst["nans"], worst["lost"]) == (second, 3, [0, 1], 1)
    assert worst["largest"] == "inf"
    assert (next_one["name"], next_one["differing"], next_one["elements"]) == (first, 1, 48)
    largest = float((near - tensors[first]).abs().max())
    scale = float(near.abs().max())
    assert next_one["largest"] == largest and next_one["relative"] == pytest.approx(largest / scale)


def test_errors_are_measured_by_the_largest_of_their_kind(command: Command, tmp_path: Path) -> None:
    """DESIGN's rule 1: a tensor of tiny entries is measured against 1e-3 of the largest parameter."""
    tensors = {"parameters/large": torch.full((4,), 100.0), "parameters/tiny": torch.full((4,), 1e-9)}
    layout = {name: [(((0,), (4,)), [RANKS[0]])] for name in tensors}
    one = write_by_hand(tmp_path / "one", tensors, layout, {})
    two = write_by_hand(tmp_path / "two", tensors | {"parameters/tiny": torch.full((4,), 2e-9)}, layout, {})
    words = ("diff", f"path={one}", f"other={two}", f"out={tmp_path}/report.json")
    assert command(*words)[0] == 1
    (found,) = json.loads((tmp_path / "report.json").read_text())["differences"]
    assert found["relative"] == pytest.approx(1e-9 / 0.1, rel=1e-5)
    assert command(*words, "tolerance=1e-7")[0] == 0 and command(*words, "tolerance=1e-9")[0] == 1


def test_numbers_that_float64_does_not_tell_apart_differ(command: Command, tmp_path: Path) -> None:
    layout = {"x": [(((0,), (1,)), [RANKS[0]])]}
    one = write_by_hand(tmp_path / "one", {"x": torch.tensor([2**60])}, layout, {})
    two = write_by_hand(tmp_path / "two", {"x": torch.tensor([2**60 + 1])}, layout, {})
    assert command("diff", f"path={one}", f"other={two}")[0] == 1
    three = write_by_hand(tmp_path / "three", {"y": torch.tensor([1])}, {"y": layout["x"]}, {})
    code, _, err = command("diff", f"path={one}", f"other={three}")
    assert code == 2 and "no tensor's name in common" in err


# ---------------------------------------------------------------- export
def test_export_is_what_safetensors_reads(command: Command, run: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    code, out, _ = command("export", f"path={run}", f"target={target}")
    assert code == 0 and f"({target.stat().st_size:,} bytes)" in out
    tensors = small_tensors()
    expected = {name.removeprefix("parameters/"): t for name, t in tensors.items() if name.startswith("parameters/")}
    read = safetensors.torch.load_file(target)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) and read[name].dtype == torch.bfloat16 for name in read)
    with safetensors.safe_open(target, "pt") as file:
        metadata = file.metadata()
    assert metadata["step"] == "10" and metadata["format"] == "pt"
    assert json.loads(metadata["model"]) == EXTRA["plan"]["model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "weights.safetensors"]


def test_export_of_main_weights_of_all_and_in_another_dtype(command: Command, run: Path, tmp_path: Path) -> None:
    tensors = small_tensors()
    main, everything, narrow = (tmp_path / f"{name}.safetensors" for name in ("main", "all", "narrow"))
    assert command("export", f"path={run}", f"target={main}", "weights=main")[0] == 0
    read = safetensors.torch.load_file(main)
    assert all(torch.equal(tensor, tensors[f"optimizer/{name}/main"]) for name, tensor in read.items())
    assert command("export", f"path={run}", f"target={everything}", "what=all")[0] == 0
    read = safetensors.torch.load_file(everything)
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert command("export", f"path={run}", f"target={narrow}", "weights=main", "dtype=fp16")[0] == 0
    read = safetensors.torch.load_file(narrow)
    assert all(torch.equal(tensor, tensors[f"optimizer/{name}/main"].half()) for name, tensor in read.items())


def test_values_beyond_the_dtype_are_refused(command: Command, tmp_path: Path) -> None:
    tensors = {"parameters/x": torch.tensor([1e6])}
    folder = write_by_hand(tmp_path / "one", tensors, {"parameters/x": [(((0,), (1,)), [RANKS[0]])]}, {})
    code, _, err = command("export", f"path={folder}", f"target={tmp_path}/x.safetensors", "dtype=fp16")
    assert code == 2 and "float16 cannot hold; use dtype=bf16" in err
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_damaged_checkpoint_leaves_no_file(command: Command, run: Path, tmp_path: Path) -> None:
    flip(checkpoint_of(run) / RANKS[0], -1)
    code, _, err = command("export", f"path={run}", f"target={tmp_path}/x.safetensors")
    assert code == 2 and "blocks.1.up.weight" in err and "verify" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["write", "sync", "rename"])
def test_ctrl_c_leaves_nothing(name: str, command: Command, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Files, name, interrupt)
    code, _, err = command("export", f"path={run}", f"target={run}/x.safetensors")
    assert code == 130 and "interrupted" in err
    assert [path.name for path in run.iterdir()] == ["checkpoints"]


# ---------------------------------------------------------------- memory
_MEASURE = """
import json, sys
from pathlib import Path
import torch
from gridtron.tools.cli import main

def kilobytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key + ":")).split()[1])

main(["checkpoint", "diff", "path=small", "other=small"])
main(["checkpoint", "export", "path=small", "target=s.safetensors", "dtype=bf16"])
found = []
for words in (["diff", "path=large", "other=other"], ["export", "path=large", "target=l.safetensors", "dtype=bf16"]):
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    assert main(["checkpoint", *words]) == 0
    found.append(1024 * (kilobytes("VmHWM") - before))
Path("measured.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell peak memory")
def test_peak_memory_is_two_tensors(tmp_path: Path) -> None:
    """Of checkpoints of three tensors each; on another grid, so that pieces have to be put together.

    Tensors above 32 MB: smaller ones may stay with the C library's allocator when they are freed.
    """
    shape, half = (5120, 1 << 11), (5120, 1 << 10)
    tensors = {f"parameters/x{number}": torch.full(shape, float(number)) for number in range(3)}
    columns = [((0, 0), half), ((0, half[1]), half)]
    cut = {name: [(box, [file]) for box, file in zip(columns, RANKS, strict=False)] for name in tensors}
    whole = {name: [(((0, 0), shape), [RANKS[0]])] for name in tensors}
    write_by_hand(tmp_path / "large", tensors, cut, {})
    write_by_hand(tmp_path / "other", tensors, whole, {})
    small_checkpoint(tmp_path / "small")
    job = subprocess.run(
        [sys.executable, "-c", _MEASURE], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert job.returncode == 0, job.stderr
    one = 4 * math.prod(shape)
    compared, exported = json.loads((tmp_path / "measured.json").read_text())
    block = 1 << 24
    small = 12 << 20
    # diff: a tensor of each. export: a tensor of float32 and its copy of bfloat16.
    assert compared < 2 * one + block + small, (compared, one)
    assert exported < 1.5 * one + block + small, (exported, one)
    read = safetensors.torch.load_file(tmp_path / "l.safetensors")
    assert read["x2"].dtype == torch.bfloat16 and bool((read["x2"] == 2).all())


def test_paths_mean_the_checkpoint_the_run_or_its_checkpoints(run: Path) -> None:
    for path in (run, run / "checkpoints", checkpoint_of(run)):
        assert open_checkpoint(str(path)).stored.path == checkpoint_of(run)
    assert set(small_layout()) == set(small_tensors())
