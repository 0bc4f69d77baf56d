"""A manifest that somebody changed and sealed again: every lie in it is refused, or means the same."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    RANKS,
    edit_manifest,
    load_alone,
    outside,
    run_commands,
    sealed_text,
    small_tensors,
    write_by_hand,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gridtron.core.checkpoint.layout import CheckpointError
from gridtron.core.checkpoint.sealed import seal
from gridtron.tools.cli import main

MANIFEST = "manifest.json"
NAME = "parameters/blocks.0.up.weight"


def at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def piece(content: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return content["tensors"][NAME]["pieces"][number]


def rename(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["tensors"].update({name: content["tensors"].pop(NAME)})


SEALED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a huge shape": lambda c: c["tensors"][NAME].update(shape=[1 << 40, 1 << 40]),
    "a huge piece": lambda c: piece(c).update(sizes=[1 << 61, 1 << 61]),
    "a number beyond any": lambda c: piece(c).update(start=1 << 80),
    "no dimension left": lambda c: c["tensors"][NAME].update(shape=[]),
    "a million dimensions": lambda c: c["tensors"][NAME].update(shape=[1] * 1_000_000),
    "a fraction": lambda c: piece(c).update(start=0.5),
    "NaN": lambda c: piece(c).update(start=float("nan")),
    "infinity": lambda c: c["files"].update({RANKS[0]: float("inf")}),
    "a negative offset": lambda c: piece(c).update(offsets=[-1, 0]),
    "overlapping pieces": lambda c: piece(c, 1).update(offsets=[2, 0]),
    "the same piece twice": lambda c: c["tensors"][NAME]["pieces"].append(piece(c)),
    "no piece": lambda c: c["tensors"][NAME].update(pieces=[]),
    "a piece in another's bytes": lambda c: piece(c, 1).update(file=RANKS[0], start=piece(c)["start"]),
    "a piece in the header": lambda c: piece(c).update(start=8),
    "a copy elsewhere": lambda c: piece(c).update(copies=[["../../../../etc/passwd", 0]]),
    "a copy in another's bytes": lambda c: piece(c).update(copies=piece(c, 1)["copies"]),
    "a copy in its own file": lambda c: piece(c).update(copies=[[RANKS[0], piece(c)["start"]]]),
    "a copy that is text": lambda c: piece(c).update(copies="xy"),
    "no copies": lambda c: piece(c).pop("copies"),
    "an absolute file": lambda c: piece(c).update(file="/etc/passwd"),
    "a file above": lambda c: c["files"].update({"../rank-00000.safetensors": 8}),
    "a file of other digits": lambda c: c["files"].update({"rank-٠٠٠٠٠.safetensors": 8}),
    "a file without bytes of ours": lambda c: c["files"].update({"rank-00009.safetensors": 64}),
    "a very long file": lambda c: c["files"].update({f"rank-{'0' * 5000}.safetensors": 64}),
    "a path as a name": rename("parameters/../../x"),
    "NUL in a name": rename("parameters/a\0b"),
    "lines in a name": rename("parameters/a\n" * 40),
    "a name that steers the terminal": rename("parameters/\x1b[2Jx"),
    "half of a letter": rename("parameters/\ud800"),
    "no name": rename(""),
    "a very long name": rename("parameters/" + "x" * 100_000),
    "safetensors' own name": rename("__metadata__"),
    "checksums that are numbers": lambda c: piece(c).update(xxh3=[1]),
    "no checksums": lambda c: piece(c).update(xxh3=[]),
    "a dtype of objects": lambda c: c["tensors"][NAME].update(dtype="O"),
    "a dtype that is a list": lambda c: c["tensors"][NAME].update(dtype=["F32"]),
    "tensors as a list": lambda c: c.update(tensors=[1]),
    "a tensor as text": lambda c: c["tensors"].update({NAME: "x"}),
    "files as a number": lambda c: c.update(files=3),
    "another version": lambda c: c.update(version=99),
    "another format": lambda c: c.update(format="x" * 100_000),
    "a version that is true": lambda c: c.update(version=[2]),
    "extra as text": lambda c: c.update(extra="x"),
}
_HARMLESS = {"a path as a name", "no copies"}
"""What ends differently: a name is no path here, and a piece without its copy leaves a hole in the third file."""


@pytest.mark.parametrize("change", SEALED)
def test_a_sealed_lie_is_refused(change: str, folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_manifest(folder, SEALED[change])
    results = run_commands(folder, sound, capsys)
    with pytest.raises(CheckpointError) as refused:
        load_alone(folder)
    assert len(str(refused.value).splitlines()) < 12 and len(str(refused.value)) < 5000
    if change == "a path as a name":
        # A key in the files, no more: their headers have another, which is found before anything is read.
        assert results["inspect"][0] == 0 and results["export"][0] == 2 and results["verify"][0] == 1
    elif change == "safetensors' own name":
        assert results["export"][0] == 2
    else:
        assert all(code != 0 for code, _ in results.values()), results
        assert MANIFEST in results["export"][1]


def test_another_file_under_a_name_above_is_not_exported_outside(
    folder: Path, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that is sound, but for names like paths: they are keys of the file that is exported."""
    from checkpoint_files import RANKS

    hostile = "parameters/../../../x"
    box = (((0,), (2,)), [RANKS[0]])
    path = write_by_hand(tmp_path / "run" / "named" / "step-00000001", {hostile: torch.ones(2)}, {hostile: [box]}, {})
    before = outside(path)
    assert main(["checkpoint", "export", f"path={path}", f"target={tmp_path}/x.safetensors"]) == 0
    assert outside(path).keys() - before.keys() == {f"{tmp_path}/x.safetensors"}
    import safetensors.torch

    assert list(safetensors.torch.load_file(tmp_path / "x.safetensors")) == ["../../../x"]


RAW: dict[str, bytes] = {
    "nothing": b"",
    "a number": b"7",
    "no text": b"\xff\xfe\0",
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "an unsealed one": json.dumps({"format": "gridtron-checkpoint"}).encode(),
    "blanks": b" " * 1_000_000,
}


RAW |= {
    "sealed noise": sealed_text("\x01\x02"),
    "sealed deep lists": sealed_text(' "extra": ' + "[" * 200_000),
    "a sealed number of a million digits": sealed_text(' "version": ' + "9" * 1_000_000 + "}"),
    "a key twice": sealed_text(' "format": "gridtron-checkpoint", "version": 2, "version": 2}'),
    "its seal twice": sealed_text(' "xxh3": "0000000000000000"}'),
}


@pytest.mark.parametrize("content", RAW)
def test_other_manifests(content: str, folder: Path, sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / MANIFEST).write_bytes(RAW[content])
    assert all(code != 0 for code, _ in run_commands(folder, sound, capsys).values())
    with pytest.raises(CheckpointError, match=MANIFEST):
        load_alone(folder)


def test_a_tensor_twice_in_the_manifest_is_named(folder: Path) -> None:
    text = (folder / MANIFEST).read_text().split("\n", 2)[2]
    doubled = text.replace(f'"{NAME}":', f'"empty":\n "x", "{NAME}":'.replace('\n "x"', "{}"), 1)
    (folder / MANIFEST).write_bytes(sealed_text(doubled))
    with pytest.raises(CheckpointError, match="'empty' stands there twice"):
        load_alone(folder)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 10**30]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([*RANKS, "F32", "F64", "BF16", NAME, "../x", "0" * 16]),
    st.lists(st.integers(-1, 9), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
)


def paths(content: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [prefix, *(path for key, value in children for path in paths(value, (*prefix, key)))]


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_changed_and_sealed_is_refused_or_means_the_same(folder: Path, sound: Path, data: Any) -> None:
    """Of what says where tensors lie, nothing can be changed so that other values are read."""
    content = json.loads((sound / MANIFEST).read_text())
    content.pop("xxh3")
    changed = copy.deepcopy(content)
    places = [path for key in ("tensors", "files") for path in paths(content[key], (key,)) if len(path) > 1]
    path = data.draw(st.sampled_from(places))
    owner = at(changed, path[:-1])
    if data.draw(st.booleans()):
        owner[path[-1]] = data.draw(VALUES)
    elif isinstance(owner, dict) and data.draw(st.booleans()):
        owner[data.draw(st.text(max_size=5))] = owner.pop(path[-1])
    else:
        owner.pop(path[-1])
    (folder / MANIFEST).write_bytes(seal(changed))
    try:
        found = load_alone(folder)
    except CheckpointError as error:
        assert len(str(error).splitlines()) < 12 and len(str(error)) < 5000
    else:
        assert all(torch.equal(found[name], tensor) for name, tensor in small_tensors().items())
