"""Text and jsonl files to token files, once: written aside, flushed, renamed; one process writes, others wait."""

from __future__ import annotations

import codecs
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gridtron.core.data.config import DataConfig
from gridtron.core.data.sources import DataError, Source, find_source
from gridtron.core.data.token_file import TokenFileWriter, open_token_file, smallest_dtype
from gridtron.core.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

FORMAT = 1
"""Part of the key of prepared data: raised when the same text would be prepared otherwise."""

_BLOCK = 1 << 24
_DOCUMENTS_AT_ONCE = 1024
# Under this, preparing takes about a second, and a progress bar is only noise.
_LONG_WORK = 50_000_000

Progress = Callable[[int], None]
"""Called with the number of bytes of text read so far."""


@dataclass(frozen=True)
class PreparedData:
    """Token files that are ready to be read, and what they were made from.

    Args:
        prefix: of the .bin and .idx.
        vocab_size: of the tokenizer.
        tokenizer: its identity: "bytes", or the hash of its file.
        described: the path, pattern or name that was asked for.
        files: number of source files.
        bytes: of the source files.
        sha256: of the contents of the source files one after another; of the .idx for token files that were given.
        documents: number of documents with text.
        tokens: number of token ids.
    """

    prefix: Path
    vocab_size: int
    tokenizer: str
    described: str
    files: int
    bytes: int
    sha256: str
    documents: int
    tokens: int

    def report(self) -> dict[str, Any]:
        """The same as JSON can hold it: for environment.json and tables."""
        return asdict(self) | {"prefix": str(self.prefix)}


def default_cache_folder(environment: dict[str, str] | os._Environ[str]) -> Path:
    """Where prepared data goes without ``data.directory``; called at entry points with ``os.environ``."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(
        environment.get("HOME") or os.path.expanduser("~"), ".cache"
    )
    return Path(base, "gridtron")


def prepare_data(config: DataConfig, cache_folder: Path, show_progress: bool | None = None) -> PreparedData:
    """The token files of ``config``, made now if they are not there yet.

    Safe from any number of processes at once: one writes, the others wait for it.

    Args:
        config: what to read and by which tokenizer.
        cache_folder: used where ``config.directory`` is null.
        show_progress: a progress bar on standard error during long work; default: where that is a terminal.

    Raises:
        DataError: unreadable or empty files, text that is not UTF-8, lines that are not JSON, a folder that cannot be
            written, a full disk. Nothing half-written is left.
    """
    source = find_source(config.path)
    tokenizer = load_tokenizer(config.tokenizer)
    if source.kind == "tokens":
        return _given(source, tokenizer)
    key = _key(source, tokenizer)
    folder = Path(config.directory) if config.directory else cache_folder
    target = folder / f"prepared-{key[:20]}"
    if not (target / "source.json").exists():
        with _directory_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with _one_writer(folder / f".prepared-{key[:20]}.lock"):
                if not (target / "source.json").exists():
                    _write_aside(source, tokenizer, target, show_progress)
    return _read_back(target, source)


def _given(source: Source, tokenizer: Tokenizer) -> PreparedData:
    binary, index = source.files
    prefix = binary.with_suffix("")
    tokens = open_token_file(prefix)
    digest = hashlib.sha256()
    with open(index, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return PreparedData(
        prefix, tokenizer.vocab_size, tokenizer.identity, source.described, 2, source.size,
        digest.hexdigest(), len(tokens.document_starts), len(tokens),
    )  # fmt: skip


def _key(source: Source, tokenizer: Tokenizer) -> str:
    """The same for the same files, unchanged, and the same tokenizer."""
    files = []
    for file in source.files:
        status = file.stat()
        files.append([str(file.absolute()), status.st_size, status.st_mtime_ns])
    return hashlib.sha256(json.dumps([FORMAT, tokenizer.identity, files]).encode()).hexdigest()


@contextmanager
def _directory_errors(folder: Path) -> Iterator[None]:
    """Turns what a folder or disk refuses into a message that says what to change."""
    try:
        yield
    except DataError:
        raise
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = "the disk is full; free some space there"
        elif fault.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = "it cannot be written; make it writable"
        elif fault.errno in (errno.ENOTDIR, errno.EEXIST):
            reason = "part of that path is a file, not a folder"
        else:
            reason = fault.strerror or str(fault)
        raise DataError(
            f"prepared data goes to {folder}: {reason}, or choose another folder by data.directory=FOLDER; "
            "nothing half-written was left"
        ) from None


@contextmanager
def _one_writer(lock: Path) -> Iterator[None]:
    """Held by one process of all at a time; released by the system when that process dies."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_aside(source: Source, tokenizer: Tokenizer, target: Path, show_progress: bool | None) -> None:
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        with _progress_bar(source.size, show_progress) as progress:
            facts = _tokenize(source, tokenizer, aside / "tokens", progress)
        with open(aside / "source.json", "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():  # left by a process that died before its source.json was there
            shutil.rmtree(target)
        os.rename(aside, target)
        _flush_folder(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _progress_bar(total: int, show: bool | None) -> Iterator[Progress]:
    if not (sys.stderr.isatty() and total > _LONG_WORK if show is None else show):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("preparing data"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def _tokenize(source: Source, tokenizer: Tokenizer, prefix: Path, progress: Progress) -> dict[str, Any]:
    writer = TokenFileWriter(prefix, smallest_dtype(tokenizer.vocab_size))
    reader = _Reader(progress)
    documents = 0
    try:
        for file in source.files:
            if file.suffix in (".jsonl", ".ndjson"):
                documents += _write_lines(reader, file, tokenizer, writer)
            else:
                documents += _write_text(reader, file, tokenizer, writer)
        tokens = writer.close()
    except BaseException:
        writer.abandon()
        raise
    if not tokens:
        raise DataError(f"data.path={source.described}: there is no text in it; give files with text")
    return {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.identity,
        "files": len(source.files),
        "bytes": reader.bytes,
        "sha256": reader.digest.hexdigest(),
        "documents": documents,
        "tokens": tokens,
        "names": [str(file) for file in source.files],
    }


class _Reader:
    """Reads files in blocks or lines, counting and hashing what passes."""

    def __init__(self, progress: Progress):
        self.digest = hashlib.sha256()
        self.bytes = 0
        self._progress = progress

    def blocks(self, file: Path, size: int | None) -> Iterator[bytes]:
        """Blocks of ``size`` bytes, or lines where it is None."""
        try:
            with open(file, "rb") as opened:
                while block := opened.readline() if size is None else opened.read(size):
                    self.digest.update(block)
                    self.bytes += len(block)
                    self._progress(self.bytes)
                    yield block
        except OSError as fault:
            raise DataError(f"{file}: {fault.strerror}; make it readable or leave it out of data.path") from None


def _write_text(reader: _Reader, file: Path, tokenizer: Tokenizer, writer: TokenFileWriter) -> int:
    """One document a file."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    texts, position = [], 0
    as_bytes = isinstance(tokenizer, ByteTokenizer)
    for block in reader.blocks(file, _BLOCK):
        held = len(decoder.getstate()[0])
        text = _decode(decoder, block, False, file, position - held)
        position += len(block)
        if as_bytes:
            writer.write(block)
        else:
            texts.append(text)
    _decode(decoder, b"", True, file, position - len(decoder.getstate()[0]))
    if texts:
        writer.write(tokenizer.encode("".join(texts)))
    return _end_document(tokenizer, writer, bool(position))


def _end_document(tokenizer: Tokenizer, writer: TokenFileWriter, has_text: bool) -> int:
    if has_text and tokenizer.end_of_document is not None:
        writer.write([tokenizer.end_of_document])
    writer.end_document()
    return int(has_text)


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, final: bool, file: Path, position: int) -> str:
    """The text of ``block``; ``position``: offset in the file of the first byte not decoded yet."""
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as fault:
        offset = position + fault.start
        byte = fault.object[fault.start]
        raise DataError(
            f"{file}: byte {byte:#04x} at offset {offset:,} is not UTF-8, which text must be under every tokenizer: "
            "convert the file (iconv -f latin1 -t utf-8) or leave it out of data.path"
        ) from None


def _write_lines(reader: _Reader, file: Path, tokenizer: Tokenizer, writer: TokenFileWriter) -> int:
    """One document a line: {"text": "..."}; blank lines and empty texts are passed over."""
    waiting: list[str] = []
    documents = position = 0

    def flush() -> int:
        for ids in tokenizer.encode_batch(waiting):
            writer.write(ids)
            _end_document(tokenizer, writer, True)
        count = len(waiting)
        waiting.clear()
        return count

    for number, line in enumerate(reader.blocks(file, None), 1):
        text = _decode(codecs.getincrementaldecoder("utf-8")(), line, True, file, position)
        position += len(line)
        if text.strip() and (document := _document(text, file, number)):
            waiting.append(document)
        if len(waiting) == _DOCUMENTS_AT_ONCE:
            documents += flush()
    return documents + flush()


def _document(line: str, file: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as fault:
        raise DataError(f'{file}: line {number} is not JSON ({fault}); each line must be {{"text": "..."}}') from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = (
            f"the keys {', '.join(map(str, record)) or 'none'}"
            if isinstance(record, dict)
            else f"a {type(record).__name__}"
        )
        raise DataError(f'{file}: line {number} holds {keys[:200]}; each line must be {{"text": "..."}}')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{file}: line {number} holds half a surrogate pair, which is no text; leave it out") from None
    return text


def _read_back(target: Path, source: Source) -> PreparedData:
    try:
        facts = json.loads((target / "source.json").read_text(encoding="utf-8"))
        facts.pop("names", None)
        prepared = PreparedData(target / "tokens", described=source.described, **facts)
    except (OSError, ValueError, TypeError):
        raise DataError(f"{target}: its source.json is damaged; remove that folder and it is prepared again") from None
    return prepared
