"""Tokenizers: bytes there and back, a tokenizer.json, and the words for what is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridtron.core.data.sources import DataError
from gridtron.core.data.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer


@given(st.text())
def test_bytes_there_and_back(text):
    tokenizer = ByteTokenizer()
    ids = list(tokenizer.encode(text))
    assert tokenizer.decode(ids) == text and all(0 <= item < tokenizer.vocab_size for item in ids)


def test_bytes_cut_inside_a_character():
    assert ByteTokenizer().decode("aé".encode()[:-1]) == "a�"


@pytest.fixture
def saved(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 7}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 8)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_file(saved):
    tokenizer = load_tokenizer(str(saved))
    highest = max(tokenizer._tokenizer.get_vocab().values())
    assert tokenizer.vocab_size == highest + 1 >= 8  # ids have a hole: the count would be too small
    assert list(tokenizer.encode("a b c")) == [1, 7, 0]  # the template's <s> is not added
    assert tokenizer.encode_batch(["a", "b b"]) == [[1], [7, 7]]
    assert tokenizer.end_of_document == tokenizer._tokenizer.token_to_id("</s>")
    assert tokenizer.decode([1, 7]) == "a b"


def test_identity_is_of_the_content(saved, tmp_path):
    copy = tmp_path / "copy.json"
    copy.write_bytes(saved.read_bytes())
    assert FileTokenizer(str(copy)).identity == FileTokenizer(str(saved)).identity
    copy.write_text(saved.read_text().replace('"b"', '"c"'))
    assert FileTokenizer(str(copy)).identity != FileTokenizer(str(saved)).identity


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "not a tokenizer.json"),
        (b"", "not a tokenizer.json"),
        (b"\x80\x04cos\nsystem\n", "not a tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer(tmp_path, content, message):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path / "x.json"))


def test_missing_and_folder(saved):
    with pytest.raises(DataError, match="no such file; give bytes or"):
        load_tokenizer("byte")
    with pytest.raises(DataError, match=r"it is a folder; nearest: data.tokenizer=.*tokenizer.json"):
        load_tokenizer(str(saved.parent))
