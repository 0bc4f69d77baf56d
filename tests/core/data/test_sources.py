"""Which files a path names, and the words for each way in which it names none."""

import os

import pytest

from gridtron.core.data import sources
from gridtron.core.data.config import DataConfig
from gridtron.core.data.prepare import prepare_data
from gridtron.core.data.sources import DataError, find_source, library_files
from gridtron.core.data.tokenizers import load_tokenizer


@pytest.mark.parametrize(
    "name", ["a b.txt", "a,b.txt", "a=b.txt", "a'b.txt", 'a"b.txt', "a*b.txt", "[x].txt", "~x.txt"]
)
def test_odd_names_are_taken_literally(tmp_path, name):
    (tmp_path / name).write_text("x")
    assert [file.name for file in find_source(str(tmp_path / name)).files] == [name]


def test_patterns(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "c.md", "deep/d.txt"):
        (tmp_path / name).write_text("x")
    assert [file.name for file in find_source(str(tmp_path / "*.txt")).files] == ["a.txt", "b.txt"]
    assert [file.name for file in find_source(str(tmp_path / "**/*.txt")).files] == ["a.txt", "b.txt", "d.txt"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("books.tx", r"no such file; nearest: data.path=.*books.txt"),
        ("zzz", r"no such file; the folder .* holds \d other entries"),
        ("no/such/folder/x", r"of the way to it only .* exists"),
        ("*.md", "no file matches the pattern"),
        ("", "is empty; give a file"),
        ("empty.txt", "the file is empty"),
        ("none*.txt", "all 2 files are empty"),
        ("half.bin", r"half.idx is missing"),
        ("zero.bin", r"zero.bin is empty"),
        ("*.bin", r"3 files with 3 .bin/.idx pairs among them; give one pair"),
        ("x" * 300, "File name too long; give a shorter path"),
    ],
)
def test_what_cannot_be_read(tmp_path, path, message):
    (tmp_path / "books.txt").write_text("x")
    for name in ("empty.txt", "none1.txt", "none2.txt", "half.bin", "zero.bin", "zero.idx", "one.bin"):
        (tmp_path / name).write_text("" if name[0] != "h" and name != "one.bin" else "x")
    with pytest.raises(DataError, match=message) as caught:
        find_source(str(tmp_path / path) if path else path)
    assert str(caught.value).count("\n") == 0


def test_folder_gets_a_pattern(tmp_path):
    for name in ("a.md", "b.md", "c.txt"):
        (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=r"it is a folder; give a pattern, as in data.path=.*/\*\.md"):
        find_source(str(tmp_path))


def test_unreadable_file(tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("x")

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=r"t.txt: Permission denied; make it readable"):
        find_source(str(tmp_path / "t.txt"))


def test_small_standard_library_is_refused(monkeypatch):
    monkeypatch.setattr(sources, "SMALLEST_LIBRARY", 10**12)
    with pytest.raises(DataError, match=r"standard library in .* give text of your own, as in data.path="):
        find_source(None)


def test_library_leaves_packages_and_tests_out(tmp_path):
    for name in ("os.py", "site-packages/x.py", "test/y.py", "json/tests/z.py", "json/decoder.py", "a.txt"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    assert [str(file.relative_to(tmp_path)) for file in library_files(tmp_path)] == ["json/decoder.py", "os.py"]


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="a pipe or a device"):
        find_source(str(tmp_path / "pipe"))
    with pytest.raises(DataError, match="a pipe or a device"):
        load_tokenizer(str(tmp_path / "pipe"))


def test_a_line_nested_too_deep_is_named(tmp_path):
    (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError, match="line 2"):
        prepare_data(DataConfig(path=str(tmp_path / "deep.jsonl")), tmp_path / "cache")
