"""The README's table of bytes is what the cost model says."""

import re
from pathlib import Path

from gridtron.models.cost.parameters import total_parameters
from gridtron.tools.memory_table import BEGIN, END, main, preset, render, replaced

README = Path(__file__).parent.parent / "README.md"


def rows(heading):
    """Cells of the table that has ``heading``."""
    table = next(part for part in render().split("\n\n") if heading in part)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_page_is_up_to_date():
    text = README.read_text(encoding="utf-8")
    assert replaced(text) == text, "run: python -m gridtron.tools.memory_table README.md"


def test_bytes_a_parameter_are_those_of_the_states():
    """AdamW's rows by hand: weight, main weight, gradient, two moments."""
    found = {(precision, optimizer): laws for precision, optimizer, *laws in rows("| precision | optimizer |")}
    assert found["fp32", "adamw"] == ["16", "8 + 8/S", "4 + 12/S", "12/S"]
    assert found["bf16, fp16", "adamw"] == ["18", "6 + 12/S", "2 + 16/S", "12/S"]
    assert found["fp64", "sgd"] == ["16", "16", "8 + 8/S", "8/S"]


def test_bytes_a_rank_follow_from_them():
    parameters = total_parameters(preset("llama3_8b")) / 1e9
    found = {tuple(cells[:4]): cells[4:] for cells in rows("| data | tensor |")}
    assert found["8", "1", "1", "0"][0] == f"{18 * parameters:.1f}"
    assert found["8", "1", "1", "3"][0] == f"{12 / 8 * parameters:.1f}"
    for between, *peaks in found.values():
        numbers = [float(peak) for peak in peaks if peak != "refused"]
        assert numbers == sorted(numbers, reverse=True) and numbers[-1] > float(between)


def test_command(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main([str(page)]) == 0
    assert re.fullmatch(rf"before\n{BEGIN}\n.+\n{END}\nafter\n", page.read_text(), re.DOTALL)
    assert "old" not in page.read_text() and render() in page.read_text()
    page.write_text("no marks")
    assert main([str(page)]) == 2 and f"no {BEGIN}" in capsys.readouterr().err and page.read_text() == "no marks"
    assert main([]) == 2 and main([str(tmp_path / "gone.md")]) == 2
