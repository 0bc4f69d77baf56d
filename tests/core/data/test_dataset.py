"""Windows over a token stream, its two parts, and what is too little or out of the vocabulary."""

import numpy as np
import pytest

from gridtron.core.data.config import DataConfig
from gridtron.core.data.dataset import TokenDataset, open_parts
from gridtron.core.data.prepare import prepare_data
from gridtron.core.data.sources import DataError
from gridtron.core.data.token_file import TokenFile


def dataset(count=20, length=4, start=0, stop=None, starts=(0, 3, 10), vocab_size=100):
    file = TokenFile(np.arange(count, dtype=np.uint8), np.array(starts))
    return TokenDataset(file, length, start, count if stop is None else stop, vocab_size)


def test_windows_share_one_token():
    tokens, documents = dataset().samples(np.array([0, 2, 3]))
    assert tokens.tolist() == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12], [12, 13, 14, 15, 16]]
    assert documents.tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("count", "length", "samples"), [(5, 4, 1), (4, 4, 0), (8, 4, 1), (9, 4, 2), (0, 4, 0), (2, 1, 1)]
)
def test_length(count, length, samples):
    assert len(dataset(count, length)) == samples


def test_every_window_is_inside():
    data = dataset(23, 5, 2, 21)
    tokens, _ = data.samples(np.arange(len(data)))
    assert tokens.shape == (3, 6) and tokens.min() == 2 and tokens.max() < 21


def test_ids_outside_the_vocabulary():
    data = dataset(vocab_size=15)
    data.samples(np.array([0]))
    with pytest.raises(DataError, match=r"token id 16 is outside the vocabulary of 15; set data\.tokenizer"):
        data.samples(np.array([3]))
    with pytest.raises(DataError, match="token id 19"):
        data.check_start()
    data.check_start(15)
    negative = TokenDataset(TokenFile(np.array([1, -2, 3]), np.array([0])), 1, 0, 3, 10)
    with pytest.raises(DataError, match="token id -2"):
        negative.check_start()


@pytest.fixture
def prepared(tmp_path):
    (tmp_path / "t.txt").write_text("x" * 200)
    return prepare_data(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "cache")


def test_parts_do_not_overlap(prepared):
    parts = open_parts(prepared, DataConfig(held_out=0.25), 10, 256)
    assert (parts.training.start, parts.training.stop) == (0, 150)
    assert (parts.held_out.start, parts.held_out.stop) == (150, 200)
    assert (len(parts.training), len(parts.held_out)) == (14, 4)


def test_too_little_text(prepared):
    with pytest.raises(DataError, match=r"150 tokens .* train.sequence_length=149 or less"):
        open_parts(prepared, DataConfig(held_out=0.25), 150, 256)
    open_parts(prepared, DataConfig(held_out=0.25), 149, 256)


def test_too_little_held_out(prepared):
    config = DataConfig(held_out=0.05)
    open_parts(prepared, config, 20, 256)
    with pytest.raises(DataError, match=r"keeps 10 tokens, .* data.held_out=0.11"):
        open_parts(prepared, config, 20, 256, needs_held_out=True)
    open_parts(prepared, DataConfig(held_out=0.11), 20, 256, needs_held_out=True)
