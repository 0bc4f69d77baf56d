"""Text to token ids and back: bytes, or any tokenizer.json."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gridtron.core.data.sources import DataError

if TYPE_CHECKING:
    import tokenizers

# Names under which published tokenizers keep their end of a document; the first that exists is used.
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|eot_id|>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        vocab_size: number of ids: each id is in [0, vocab_size).
        identity: equal for tokenizers that give equal ids; part of the key of prepared data.
        end_of_document: the id put after each document, or None.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def identity(self) -> str: ...

    @property
    def end_of_document(self) -> int | None: ...

    def encode(self, text: str) -> Sequence[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """The bytes of the text's UTF-8 form; 256 ids, nothing between documents."""

    vocab_size = 256
    identity = "bytes"
    end_of_document: int | None = None

    def encode(self, text: str) -> Sequence[int]:
        return text.encode("utf-8")

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are no whole character (a text cut inside one) show as U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json of the ``tokenizers`` library.

    Special tokens of its template (a beginning of text, say) are not added; the end of a document is, where the
    vocabulary has one under a usual name.

    Args:
        path: of the file.

    Raises:
        DataError: no such file, or not a tokenizer.
    """

    def __init__(self, path: str):
        content = _read_tokenizer(path)
        self._tokenizer = _parse_tokenizer(path, content)
        self.identity = "sha256:" + hashlib.sha256(content).hexdigest()

    @property
    def vocab_size(self) -> int:
        # Ids may have holes, and added tokens may lie above the count: what matters is the highest id.
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_of_document(self) -> int | None:
        ids = (self._tokenizer.token_to_id(name) for name in _END_OF_DOCUMENT)
        return next((found for found in ids if found is not None), None)

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [item.ids for item in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that ``data.tokenizer`` names: ``bytes`` or the path of a tokenizer.json.

    Raises:
        DataError: no such file, or not a tokenizer.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)


def _read_tokenizer(path: str) -> bytes:
    file = Path(path)
    try:
        if not (file.is_file() or file.is_dir()) and file.exists():
            raise DataError(f"data.tokenizer={path}: it is a pipe or a device; give the path of a tokenizer.json")
        return file.read_bytes()
    except FileNotFoundError:
        raise DataError(f"data.tokenizer={path}: no such file; give bytes or the path of a tokenizer.json") from None
    except IsADirectoryError:
        inner = file / "tokenizer.json"
        hint = f"nearest: data.tokenizer={inner}" if inner.is_file() else "give the path of a tokenizer.json in it"
        raise DataError(f"data.tokenizer={path}: it is a folder; {hint}") from None
    except OSError as fault:
        raise DataError(f"data.tokenizer={path}: {fault.strerror}; make the file readable") from None


def _parse_tokenizer(path: str, content: bytes) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as fault:  # the library raises plain Exception
        reason = str(fault).splitlines()[0][:120] if str(fault) else type(fault).__name__
        raise DataError(f"data.tokenizer={path}: not a tokenizer.json ({reason}); give one, or bytes") from None
    if not tokenizer.get_vocab_size():
        raise DataError(f"data.tokenizer={path}: its vocabulary is empty; give another tokenizer.json, or bytes")
    return tokenizer
