"""Files from elsewhere are data: whatever is planted ends in a short message, runs nothing, asks for no memory on its
word, and nothing is written outside."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import EXTRA, RANKS, commands, edit_manifest, load_alone, run_commands, sealed_text, small_tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.checkpoint.manifest import Manifest
from gridtron.core.checkpoint.stored import Stored
from gridtron.tools.cli import main

MANIFEST = "manifest.json"
NAME = "parameters/blocks.0.up.weight"


# ---------------------------------------------------------------- what stands in the place of a file
def _socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # such a path may have 100 characters
        server.bind(path.name)
        os.chdir(here)


def _linked(path: Path) -> None:
    elsewhere = path.parents[3] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


PLANTED: dict[str, Callable[[Path], object]] = {
    "a link to the same bytes": _linked,
    "a link to a device": _device,
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "a pipe": _pipe,
    "a folder": _folder,
    "a socket": _socket,
    "nothing": lambda path: path.unlink(),
    "an empty file": lambda path: path.write_bytes(b""),
    "a sparse terabyte": lambda path: os.truncate(path, 1 << 40),
    "half of it": lambda path: os.truncate(path, path.stat().st_size // 2),
    "more than it": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8),
    "noise": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
}


@pytest.mark.parametrize("file", [MANIFEST, *RANKS[:2]])
@pytest.mark.parametrize("planted", PLANTED)
def test_something_else_in_the_place_of_a_file(
    planted: str, file: str, folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PLANTED[planted](folder / file)
    with pytest.raises(CheckpointError) as refused:
        load_alone(folder)
    results = run_commands(folder, sound, capsys)
    if file == MANIFEST:
        assert MANIFEST in str(refused.value)
        assert all(code != 0 for code, _ in results.values())
        return
    for word in ("diff", "diff from the other side", "export"):
        assert results[word][0] == 2 and file in results[word][1], results
    assert results["verify"][0] == 1 and file in results["verify"][1]
    # Every piece of it lies in another file; what is a folder is left to its owner.
    assert results["repair"][0] == (1 if planted == "a folder" else 0)
    if planted != "a folder":
        assert (folder / file).read_bytes() == (sound / file).read_bytes() and not (folder / file).is_symlink()


def test_files_that_were_swapped(folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (folder / file for file in RANKS[:2])
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert run_commands(folder, sound, capsys)["repair"][0] == 0
    assert (first.read_bytes(), second.read_bytes()) == contents


def test_a_hard_link_to_the_same_bytes_is_a_plain_file(folder: Path, tmp_path: Path) -> None:
    os.link(folder / RANKS[0], tmp_path / "also")
    assert load_alone(folder).keys() == small_tensors().keys()


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("file", [MANIFEST, RANKS[0], "__init__.py", ".metadata"])
def test_a_pickle_is_never_read(
    file: str, folder: Path, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "ran"
    (folder / file).write_bytes(pickle.dumps(Planted(mark)))
    run_commands(folder, sound, capsys)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Planted(mark)))
    assert mark.exists(), "the planted pickle must be one that runs"


# ---------------------------------------------------------------- single bytes
@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_is_found_by_verify_and_by_load(folder: Path, capsys: Any, data: Any) -> None:
    file = folder / data.draw(st.sampled_from([MANIFEST, *RANKS]))
    content = file.read_bytes()
    place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    try:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        assert main(["checkpoint", "verify", f"path={folder}"]) == 1
        assert file.name in capsys.readouterr().out
        # The third file holds copies alone, which nobody loads.
        if file.name != RANKS[2]:
            with pytest.raises(CheckpointError, match=file.name):
                load_alone(folder)
    finally:
        file.write_bytes(content)


@given(st.binary(max_size=64), st.integers(0, 3000), st.integers(0, 200))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_in_place_of_others_in_the_manifest(folder: Path, new: bytes, start: int, length: int) -> None:
    file = folder / MANIFEST
    content = file.read_bytes()
    changed = content[:start] + new + content[start + length :]
    try:
        file.write_bytes(changed)
        if changed == content:
            return
        with pytest.raises(CheckpointError, match=MANIFEST):
            Manifest.read(folder)
    finally:
        file.write_bytes(content)


# ---------------------------------------------------------------- the run's own values
EXTRAS: dict[str, Any] = {
    "nothing": {},
    "lists": {"progress": [1, 2], "callbacks": [3], "plan": [4]},
    "text": {"progress": "x", "callbacks": "y", "plan": "z"},
    "other types": {"progress": {"step": "ten", "position": None, "tokens": 1.5}, "plan": {"model": [1]}},
    "huge numbers": {"progress": {"step": 10**300, "position": -1, "tokens": True}, "callbacks": {}},
    "text that steers": {"progress": {}, "plan": {"model": {"\x1b[31m": "\x1b[2J\n" * 20}}},
    "long text": {"plan": {"model": {"x" * 100_000: "y" * 100_000}}},
    "deep": {"plan": {"model": json.loads("[" * 300 + "]" * 300)}},
    "NaN": {"progress": {"step": float("nan")}, "plan": {"model": {"x": float("nan")}}},
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_values_of_the_run_are_taken_for_what_they_are(
    extra: str, folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tensors are sound, so every command works; nothing of the values reaches the terminal as it stands."""
    edit_manifest(folder, lambda content: content.update(extra=EXTRAS[extra]))
    for word, words in commands(folder, sound).items():
        code = main(["checkpoint", *words])
        printed = capsys.readouterr()
        assert code == (1 if word.startswith("diff") else 0), (word, printed)
        assert all(letter.isprintable() or letter == "\n" for letter in printed.out) and printed.err == ""
        assert len(printed.out) < 30_000
    assert load_alone(folder).keys() == small_tensors().keys()
    assert Stored(folder).manifest.extra.keys() == EXTRAS[extra].keys()
    assert EXTRA.keys() == {"progress", "callbacks", "plan"}


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"num_layers": 10**9, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}, "10000000"),
        ({"num_layers": 1, "hidden_size": 10**12, "num_attention_heads": 4, "vocab_size": 10**12}, "10000000"),
        ({"num_layers": "x"}, "model.num_layers"),
        ([1], "does not say which model"),
        ({"x" * 100_000: "y" * 100_000}, "cannot be read"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "train"])
def test_a_model_that_is_larger_than_its_tensors_is_not_made(
    command: str, model: Any, told: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where names and memory would follow from what the file says of its model."""
    edit_manifest(folder, lambda content: content["extra"]["plan"].update(model=model))
    if command == "convert":
        words = [f"source={folder}", f"target={tmp_path}/converted"]
    else:
        words = [f"checkpoint.init_from={folder}", "--cfg", "job"]
    assert main([command, *words]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) < 12 and len(error) < 5000
    assert not (tmp_path / "converted").exists()


# ---------------------------------------------------------------- memory
_LIMITED = """
import json, os, resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_hostile import load_alone
from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.tools.cli import main

def kilobytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key + ":")).split()[1])

def all_of(folder):
    codes = []
    for words in (["inspect"], ["verify"], ["diff", "other=sound"], ["export", "target=x.safetensors", "what=all"]):
        codes.append(main(["checkpoint", *words, f"path={{folder}}"]))
        Path("x.safetensors").unlink(missing_ok=True)
    try:
        load_alone(Path(folder))
        codes.append(0)
    except CheckpointError:
        codes.append(2)
    return codes

found = {{"sound": all_of("sound")}}
limit = 1024 * kilobytes("VmSize") + (120 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for folder in sys.argv[1:]:
    found[folder] = all_of(folder)
Path("found.json").write_text(json.dumps(found))
"""


def plant_large_tensor(folder: Path) -> None:
    """A tensor of 256 MB that is really there, in a file of holes, with the checksums of its zeros."""
    from gridtron.core.checkpoint.manifest import BLOCK, Piece, TensorEntry
    from gridtron.core.checkpoint.stream import checksum

    size = 1 << 28
    checks = (checksum(memoryview(bytes(BLOCK))),) * (size // BLOCK)
    entry = TensorEntry("U8", (size,), (Piece((0,), (size,), RANKS[0], 0, checks),))
    header = Manifest({"large": entry}, {RANKS[0]: size}, {}).header(RANKS[0])
    placed = TensorEntry("U8", (size,), (Piece((0,), (size,), RANKS[0], len(header), checks),))
    folder.mkdir()
    (folder / MANIFEST).write_bytes(Manifest({"large": placed}, {RANKS[0]: size + len(header)}, {}).to_json())
    (folder / RANKS[0]).write_bytes(header)
    os.truncate(folder / RANKS[0], size + len(header))


@pytest.mark.slow
def test_no_memory_is_taken_on_the_word_of_a_file(sound: Path, tmp_path: Path) -> None:
    """In a process that may have 120 MB more than it has."""
    for name in ("sound", "long", "many", "lying"):
        shutil.copytree(sound, tmp_path / name)
    os.truncate(tmp_path / "long" / MANIFEST, 300 << 20)
    # Eight megabytes of text that would be hundreds of megabytes of objects.
    (tmp_path / "many" / MANIFEST).write_bytes(sealed_text(' "extra": [' + "[]," * 2_500_000 + "[]]}"))
    with (tmp_path / "lying" / RANKS[0]).open("r+b") as file:
        file.write((1 << 63).to_bytes(8, "little"))
    plant_large_tensor(tmp_path / "large")
    code = _LIMITED.format(tests=str(Path(__file__).parent))
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    job = subprocess.run(
        [sys.executable, "-c", code, "long", "lying", "large", "many"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert job.returncode == 0, job.stderr
    assert "Traceback" not in job.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    # inspect, verify, diff, export, load
    assert found == {
        "sound": [0, 0, 0, 0, 0],
        "long": [2, 1, 2, 2, 2],
        "many": [2, 1, 2, 2, 2],
        "lying": [0, 1, 2, 2, 2],
        "large": [0, 0, 2, 2, 2],
    }
