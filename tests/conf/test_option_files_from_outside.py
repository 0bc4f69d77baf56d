"""Option files of a user's own that are no option files."""

import pytest

from gridtron.conf.compose import compose
from gridtron.conf.refusal import Refusal


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"- 1\n- 2\n", "cannot be combined"), (b"\xff\xfe\x00a: 1", "not UTF-8 text"), (b"a: [1", "cannot be combined")],
)
def test_files_that_cannot_be_read_as_options(content, words, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_bytes(content)
    with pytest.raises(Refusal) as raised:
        compose(["model=mine"], [str(tmp_path)])
    assert words in str(raised.value)
