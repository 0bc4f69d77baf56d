"""docs/configuration.md is what the dataclasses say."""

from pathlib import Path

from gridtron.conf.schema import all_options
from gridtron.tools.document import main, render

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == render(), "run: python -m gridtron.tools.document docs/configuration.md"


def test_every_option_has_a_row():
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in rows] == list(all_options())


def test_command(tmp_path, capsys):
    assert main([str(tmp_path / "x.md")]) == 0 and (tmp_path / "x.md").read_text() == render()
    assert main([]) == 2 and "usage" in capsys.readouterr().err
