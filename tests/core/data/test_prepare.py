"""Preparing: what comes out, that it is written once and whole, and what is refused with which words."""

import errno
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest

from gridtron.core.data import prepare as module
from gridtron.core.data.config import DataConfig
from gridtron.core.data.prepare import default_cache_folder, prepare_data
from gridtron.core.data.sources import DataError
from gridtron.core.data.token_file import open_token_file


def words_tokenizer(path, words=("a", "b", "c"), special=()):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(("?", *words))}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path))
    return str(path)


def tokens_of(prepared):
    return open_token_file(prepared.prefix)


def test_text_files_are_documents_in_sorted_order(tmp_path):
    (tmp_path / "b.txt").write_text("bé")
    (tmp_path / "a.txt").write_text("xyz")
    (tmp_path / "c.txt").write_text("")
    prepared = prepare_data(DataConfig(path=str(tmp_path / "*.txt")), tmp_path / "cache")
    content = "xyzbé".encode()
    tokens = tokens_of(prepared)
    assert bytes(tokens.tokens) == content and tokens.document_starts.tolist() == [0, 3]
    assert prepared.report() | {"prefix": ""} == {
        "prefix": "", "vocab_size": 256, "tokenizer": "bytes", "described": str(tmp_path / "*.txt"), "files": 3,
        "bytes": 6, "sha256": hashlib.sha256(content).hexdigest(), "documents": 2, "tokens": 6,
    }  # fmt: skip


def test_jsonl_lines_are_documents(tmp_path):
    lines = [json.dumps({"text": text, "id": 1}) for text in ("one", "", "two\nlines")]
    (tmp_path / "d.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]))
    prepared = prepare_data(DataConfig(path=str(tmp_path / "d.jsonl")), tmp_path / "cache")
    assert bytes(tokens_of(prepared).tokens) == b"onetwo\nlines" and prepared.documents == 2


def test_many_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_DOCUMENTS_AT_ONCE", 4)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": f"<{number}>"}) + "\n" for number in range(11)))
    prepared = prepare_data(DataConfig(path=str(tmp_path / "d.jsonl")), tmp_path / "cache")
    assert bytes(tokens_of(prepared).tokens).decode() == "".join(f"<{number}>" for number in range(11))
    assert prepared.documents == 11 == len(tokens_of(prepared).document_starts)


def test_tokenizer_file_and_its_end_of_document(tmp_path):
    (tmp_path / "t.txt").write_text("a b\nc zzz")
    plain = words_tokenizer(tmp_path / "plain.json")
    ended = words_tokenizer(tmp_path / "ended.json", special=("<|endoftext|>",))
    assert tokens_of(
        prepare_data(DataConfig(path=str(tmp_path / "t.txt"), tokenizer=plain), tmp_path / "cache")
    ).tokens.tolist() == [1, 2, 3, 0]
    prepared = prepare_data(DataConfig(path=str(tmp_path / "t.txt"), tokenizer=ended), tmp_path / "cache")
    assert tokens_of(prepared).tokens.tolist() == [1, 2, 3, 0, 4] and prepared.vocab_size == 5


def test_token_files_are_taken_as_they_are(tmp_path):
    (tmp_path / "t.txt").write_text("abc")
    first = prepare_data(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "cache")
    for path in (f"{first.prefix}.bin", f"{first.prefix}.idx", str(first.prefix)):
        again = prepare_data(DataConfig(path=path), tmp_path / "cache")
        assert (again.prefix, again.tokens, again.documents) == (first.prefix, 3, 1)


def test_prepared_once_and_again_after_a_change(tmp_path, monkeypatch):
    config = DataConfig(path=str(tmp_path / "t.txt"))
    (tmp_path / "t.txt").write_text("abc")
    first = prepare_data(config, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_aside", lambda *arguments: pytest.fail("prepared twice"))
        assert prepare_data(config, tmp_path / "cache") == first
    (tmp_path / "t.txt").write_text("abcd")
    assert prepare_data(config, tmp_path / "cache").tokens == 4


def test_directory_option(tmp_path):
    (tmp_path / "t.txt").write_text("abc")
    prepared = prepare_data(DataConfig(path=str(tmp_path / "t.txt"), directory=str(tmp_path / "own")), tmp_path / "no")
    assert prepared.prefix.is_relative_to(tmp_path / "own") and not (tmp_path / "no").exists()


def test_default_cache_folder():
    assert str(default_cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"})) == "/x/gridtron"
    assert str(default_cache_folder({"HOME": "/h"})) == "/h/.cache/gridtron"


def _prepare_and_record(path, cache, log):
    written = module._write_aside

    def recorded(*arguments):
        with open(log, "a") as file:
            file.write("written\n")
        written(*arguments)

    module._write_aside = recorded
    prepare_data(DataConfig(path=path), cache)


def test_one_process_writes_and_others_wait(tmp_path):
    (tmp_path / "t.txt").write_text("abc" * 300_000)
    context = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "t.txt"), tmp_path / "cache", tmp_path / "log")
    workers = [context.Process(target=_prepare_and_record, args=arguments) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "log").read_text() == "written\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.txt", b"good \xff bad", r"t.txt: byte 0xff at offset 5 is not UTF-8"),
        ("t.txt", b"cut \xc3", r"t.txt: byte 0xc3 at offset 4"),
        ("t.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"t.jsonl: byte 0xe9 at offset 24"),
        ("t.jsonl", b'{"text": "a"}\n{"text": \n', r"line 2 is not JSON"),
        ("t.jsonl", b'{"content": "a", "id": 1}\n', r"line 1 holds the keys content, id; each line must be"),
        ("t.jsonl", b"[1]\n", r"line 1 holds a list"),
        ("t.jsonl", b'{"text": "\\ud800"}\n', r"line 1 holds half a surrogate pair"),
        ("t.jsonl", b'{"text": ""}\n\n', r"there is no text in it"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare_data(DataConfig(path=str(tmp_path / name)), tmp_path / "cache")
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.suffix != ".lock"]


@pytest.mark.parametrize("cut", range(1, 12))
def test_offset_of_a_bad_byte_across_blocks(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(module, "_BLOCK", cut)
    content = "aé€😀".encode() + b"\xff" + "é".encode()
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(DataError, match="byte 0xff at offset 10 is"):
        prepare_data(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "cache")


@pytest.mark.parametrize("cut", range(1, 8))
def test_blocks_do_not_change_the_text(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(module, "_BLOCK", cut)
    (tmp_path / "t.txt").write_text("a b € c")
    prepared = prepare_data(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "one")
    assert bytes(tokens_of(prepared).tokens).decode() == "a b € c"
    tokenizer = words_tokenizer(tmp_path / "w.json", ("a", "b", "€", "c"))
    prepared = prepare_data(DataConfig(path=str(tmp_path / "t.txt"), tokenizer=tokenizer), tmp_path / "two")
    assert tokens_of(prepared).tokens.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_full_disk_leaves_nothing(tmp_path, monkeypatch, code):
    (tmp_path / "t.txt").write_text("abc")

    def full(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"data.directory=FOLDER; nothing half-written was left") as caught:
        prepare_data(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "cache")
    assert ("the disk is full" in str(caught.value)) == (code == errno.ENOSPC)
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.suffix != ".lock"]
    monkeypatch.undo()
    assert prepare_data(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "cache").tokens == 3


FULL = """
import resource, sys
from pathlib import Path
from gridtron.core.data.config import DataConfig
from gridtron.core.data.prepare import prepare_data
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    prepare_data(DataConfig(path=sys.argv[1]), Path(sys.argv[2]))
except ValueError as fault:
    print(fault)
"""


def test_file_that_may_not_grow(tmp_path):
    """The system refuses the write itself, in the middle of the tokens."""
    (tmp_path / "t.txt").write_text("abc" * 10_000)
    command = [sys.executable, "-c", FULL, str(tmp_path / "t.txt"), str(tmp_path / "cache")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "the disk is full; free some space there, or choose another folder" in result.stdout and not result.stderr
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.suffix != ".lock"]


def test_cache_that_is_a_file(tmp_path):
    (tmp_path / "t.txt").write_text("abc")
    (tmp_path / "cache").write_text("")
    with pytest.raises(DataError, match="is a file, not a folder"):
        prepare_data(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "cache" / "deep")


def test_left_over_of_a_dead_process_is_replaced(tmp_path):
    (tmp_path / "t.txt").write_text("abc")
    config = DataConfig(path=str(tmp_path / "t.txt"))
    prepared = prepare_data(config, tmp_path / "cache")
    (prepared.prefix.parent / "source.json").unlink()
    (prepared.prefix.parent / "tokens.bin").write_bytes(b"a")
    assert bytes(tokens_of(prepare_data(config, tmp_path / "cache")).tokens) == b"abc"


def test_damaged_facts(tmp_path):
    (tmp_path / "t.txt").write_text("abc")
    prepared = prepare_data(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "cache")
    (prepared.prefix.parent / "source.json").write_text("{")
    with pytest.raises(DataError, match="remove that folder"):
        prepare_data(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "cache")


def test_progress_bar_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the captured stream for a terminal
    (tmp_path / "t.txt").write_text("abc")
    prepared = prepare_data(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "cache", show_progress=True)
    assert prepared.tokens == 3 and "preparing data" in capsys.readouterr().err


def test_standard_library_is_the_default(tmp_path):
    prepared = prepare_data(DataConfig(), tmp_path / "cache")
    assert prepared.bytes > 2_000_000 and prepared.files > 100 and len(prepared.sha256) == 64
    head = bytes(tokens_of(prepared).tokens[:4000].astype(np.uint8)).decode(errors="ignore")
    assert "import" in head or '"""' in head
