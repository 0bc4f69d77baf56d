"""A Hugging Face folder on the disk: config.json and safetensors files. Read as data; nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What a folder may hold for transformers' AutoTokenizer, and for generating."""

_LARGEST_JSON = 1 << 28
_LONGEST_NAME = 500
_LISTED = 6
_MAPPED = 1 << 26
"""Bytes that are read of a file before it is opened anew."""


def is_huggingface(path: Path) -> bool:
    """Whether a folder looks like one of Hugging Face's."""
    return (path / CONFIG).is_file() and not (path / "manifest.json").is_file()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: it is missing, unreadable, too large or holds something else.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST_JSON + 1)
        if len(content) > _LARGEST_JSON:
            raise ValueError(f"it is larger than {_LARGEST_JSON} bytes")
        found = json.loads(content.decode())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({str(error)[:120]}); get the file again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__} and should hold an object; get the file again")
    return found


class Folder:
    """The tensors of a folder, by the names they have there; slices are read from the files as they are asked for.

    Files may be links: a hub's cache consists of them.

    Args:
        path: the folder.

    Raises:
        ValueError: there are no safetensors files, or an index that names what is not there, all of it listed.
    """

    def __init__(self, path: Path):
        self.path = path
        self.files = _weight_map(path)
        self._opened: dict[str, Any] = {}
        self._read: dict[str, int] = {}
        missing = sorted({name for name in self.files.values() if not (path / name).is_file()})
        if missing:
            raise ValueError(f"{path}: {INDEX} names files that are not there: {_listing(missing)}; get them again")
        if not self.files:
            self.files = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        strange = [name for name in self.files if not (name.isprintable() and len(name) <= _LONGEST_NAME)]
        if strange:
            raise ValueError(f"{path}: {strange[0]!r:.80} is no tensor's name; get the files again")
        by_file: dict[str, list[str]] = {}
        for name, file in self.files.items():
            by_file.setdefault(file, []).append(name)
        for file, names in by_file.items():
            held = set(self._open(file).keys())
            if lost := [name for name in names if name not in held]:
                raise ValueError(f"{path / file} lacks tensors that {INDEX} puts there: {_listing(lost)}")

    def names(self) -> list[str]:
        return list(self.files)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            from safetensors import SafetensorError, safe_open

            try:
                self._opened[file] = safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{self.path / file} is not a whole safetensors file ({str(error)[:120]}); get it again"
                ) from None
        return self._opened[file]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self.files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """safetensors' code."""
        return str(self._open(self.files[name]).get_slice(name).get_dtype())

    def slice(self, name: str, *ranges: slice) -> Tensor:
        """A rectangle of a tensor, and no more of it in memory."""
        file = self.files[name]
        found: Tensor = self._open(file).get_slice(name)[ranges]
        self._read[file] = self._read.get(file, 0) + found.nbytes
        if self._read[file] > _MAPPED:
            # The pages of a mapped file stay with the process until nobody refers to it.
            del self._opened[file], self._read[file]
        return found


def _weight_map(path: Path) -> dict[str, str]:
    """Name -> file of an index; empty where one file holds all."""
    if (path / SINGLE).is_file():
        return {}
    if not (path / INDEX).is_file():
        if not path.is_dir():
            raise ValueError(f"{path}: no such folder")
        pickled = sorted(file.name for file in path.glob("*.bin")) + sorted(file.name for file in path.glob("*.pt*"))
        if pickled:
            raise ValueError(
                f"{path} holds {_listing(pickled)} and no {SINGLE}: such files are programs to be run, and nothing is "
                "unpickled here; convert them by transformers: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW, safe_serialization=True)"
            )
        raise ValueError(f"{path} holds neither {SINGLE} nor {INDEX}; give a folder with the weights in it")
    named = read_json(path / INDEX).get("weight_map")
    if not isinstance(named, Mapping) or not named:
        raise ValueError(f"{path / INDEX} has no weight_map; get the file again")
    outside = sorted({str(file) for file in named.values() if not _is_plain(file)})
    if outside:
        raise ValueError(
            f"{path / INDEX} names files that are none of this folder's: {_listing(outside)}; nothing of them was read"
        )
    return {str(name): file for name, file in named.items()}


def _is_plain(file: Any) -> bool:
    return isinstance(file, str) and file.endswith(".safetensors") and "/" not in file and "\\" not in file


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
