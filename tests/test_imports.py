"""Imports run one way: tools -> conf -> models -> parallel -> core; and importing the layers is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ["core", "parallel", "models", "conf", "tools"]
HEAVY = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers", "triton")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("floor", FLOORS)
def test_no_floor_imports_from_above(floor):
    above = FLOORS[FLOORS.index(floor) + 1 :]
    files = sorted((ROOT / floor).rglob("*.py"))
    assert files
    for path in files:
        for name in imported(path):
            parts = name.split(".")
            assert not (parts[0] == "gridtron" and len(parts) > 1 and parts[1] in above), f"{path} imports {name}"
            assert parts[0] not in FLOORS, f"{path} imports bare {name}"


def test_importing_the_layers_is_light():
    """What would cost the time is not loaded: by sys.modules, not by a timer."""
    code = (
        "import sys, torch; before = set(sys.modules); from gridtron.parallel import *; "
        "print('\\n'.join(set(sys.modules) - before))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    new = out.stdout.split()
    heavy = [name for name in new if name.startswith((*HEAVY, "hydra", "omegaconf", "rich", "tensorboard", "pandas"))]
    assert not heavy
    # 300 modules of pure Python are about 0.3 s; today it is a fraction of that.
    assert len(new) < 120, sorted(new)


def test_files_and_functions_stay_small():
    for path in [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]:
        text = path.read_text()
        assert text.count("\n") <= 400, f"{path} is past 400 lines: the design wants another room"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name} is past 60 lines"


def test_private_names_of_torch_stand_in_one_place():
    for path in [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]:
        if path.name == "torch_compat.py" or path.parent.name == "bench":
            continue  # the bench gives Megatron-core a CPU's answers to its own private questions
        tree = ast.parse(path.read_text())
        names = [name for name in imported(path) if name.startswith("torch")]
        names += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        private = [
            n
            for n in names
            if n.split(".")[0] in ("torch", "dist") and any(part.startswith("_") for part in n.split("."))
        ]
        assert not private, f"{path}: {private}"
