"""``gridtron convert``: a Hugging Face folder becomes a checkpoint, a checkpoint a Hugging Face folder.

One process, a few tensors in memory at a time; the target has its name only when all of it is written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridtron.conf.refusal import Refusal
from gridtron.core.errors import JobError
from gridtron.core.options import option
from gridtron.core.precision import FORMATS, dtype_named
from gridtron.tools.arguments import parse_arguments, print_refusal, read_options

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gridtron.models.config import GPTConfig

Read = Callable[[str], "Tensor"]


@dataclass(frozen=True)
class ConvertOptions:
    source: str | None = option(
        None, "a Hugging Face folder, a checkpoint, or the folder of a run (its newest)", path=True
    )
    target: str | None = option(None, "the folder to make; it must not exist", path=True)
    family: str | None = option(
        None, "of a Hugging Face target: llama, mistral, qwen2, gpt2, gpt_neox; null: by the model's shape"
    )
    dtype: str | None = option(None, "of the target's weights; null: as they are", choices=(*FORMATS, None))
    shard_bytes: int = option(5 * 10**9, "of one file of a Hugging Face target at most", minimum=1)


def main(arguments: Sequence[str]) -> int:
    """Converts; prints where the result lies. Returns the exit code."""
    try:
        parsed = parse_arguments(arguments)
        if parsed.sweep or parsed.show or parsed.directories:
            raise Refusal(["convert takes source=, target=, family=, dtype= and shard_bytes= only"])
        options = read_options("convert", ConvertOptions, parsed.overrides)
        lines = convert(options)
    except Refusal as refusal:
        return print_refusal(refusal)
    except (JobError, ValueError) as fault:
        return print_refusal(Refusal([str(fault)]))
    except OSError as fault:
        return print_refusal(Refusal([f"{fault.filename or 'target'}: {fault.strerror}; nothing was written"]))
    for line in lines:
        print(line)
    return 0


def convert(options: ConvertOptions) -> list[str]:
    """Makes the target; what to tell of it.

    Raises:
        ValueError, JobError: what is wrong; nothing is left of the target.
    """
    if missing := [name for name in ("source", "target") if not getattr(options, name)]:
        raise Refusal([f"{name}= is missing: gridtron convert source=PATH target=PATH" for name in missing])
    source, target = (Path(text or "").expanduser().absolute() for text in (options.source, options.target))
    if not source.is_dir():
        raise Refusal([f"source={source}: {'it is a file' if source.exists() else 'no such folder'}; give a folder"])
    if os.path.lexists(target):
        raise Refusal([f"target={target} exists; give another folder, or move it away"])
    from gridtron.models.huggingface.folder import is_huggingface

    if is_huggingface(source):
        if options.family is not None:
            raise Refusal(
                [f"family={options.family} is of a Hugging Face target, and that is the source; leave it out"]
            )
        if options.shard_bytes != ConvertOptions.shard_bytes:
            raise Refusal(
                [f"shard_bytes={options.shard_bytes} is of a Hugging Face target, and that is the source; leave it out"]
            )
        return _to_checkpoint(source, target, options)
    return _to_huggingface(source, target, options)


# -------------------------------------------------------------------- from Hugging Face
def _to_checkpoint(source: Path, target: Path, options: ConvertOptions) -> list[str]:
    import torch

    from gridtron.conf.schema import Plan, plan_to_dict
    from gridtron.core.checkpoint.layout import step_path
    from gridtron.core.checkpoint.manifest import DTYPES
    from gridtron.core.checkpoint.whole import write_checkpoint
    from gridtron.core.files import Files, folder_aside
    from gridtron.models.huggingface.reading import HuggingFaceWeights

    weights = HuggingFaceWeights(source)
    config, shapes = weights.translation.config, weights.shapes
    dtypes: dict[str, torch.dtype] = {
        name: getattr(torch, FORMATS[options.dtype] if options.dtype else DTYPES[weights.dtype(name)][0])
        for name in shapes
    }
    plan: dict[str, Any] = {"model": plan_to_dict(Plan(model=config))["model"]}
    if (source / "tokenizer.json").is_file():
        plan["data"] = {"tokenizer": str(source / "tokenizer.json")}
    extra = {"plan": plan, "progress": {"step": 0, "position": 0, "tokens": 0}, "callbacks": {}}

    def read(name: str) -> Tensor:
        name = name.removeprefix(_PARAMETER)
        return weights.read(name, (0,) * len(shapes[name]), shapes[name]).to(dtypes[name])

    tensors = {_PARAMETER + name: (dtypes[name], shape) for name, shape in shapes.items()}
    with folder_aside(target, Files()) as folder, _progress(len(tensors), read) as told:
        write_checkpoint(step_path(folder, 0), tensors, told, extra)
    notes = [f"note: {note}" for note in weights.translation.notes]
    return [*notes, f"{target}: a checkpoint of {_described(config)}; train from it by checkpoint.init_from={target}"]


_PARAMETER = "parameters/"


# -------------------------------------------------------------------- to Hugging Face
def _to_huggingface(source: Path, target: Path, options: ConvertOptions) -> list[str]:
    from gridtron.conf.warm_start import stored_config, tensor_faults
    from gridtron.core.checkpoint.find import look_for
    from gridtron.core.checkpoint.layout import CheckpointError
    from gridtron.core.checkpoint.stored import Stored
    from gridtron.core.checkpoint.weights import CheckpointWeights
    from gridtron.models.huggingface.writing import save_huggingface

    try:
        found = look_for(source)
        assert found.path is not None
        stored = Stored(found.path)
    except CheckpointError as fault:
        if any(source.glob("*.safetensors")) or any(source.glob("*.bin")):
            raise Refusal([f"{source} has no config.json: a Hugging Face folder has one; get the file again"]) from None
        raise Refusal([f"{fault}; a Hugging Face folder has a config.json, and this has none"]) from None
    config = stored_config(stored.manifest, stored.path)
    if config is None:
        raise Refusal([f"{stored.path} holds a model of its user's own, which no family of Hugging Face's is"])
    weights = CheckpointWeights(stored)
    if faults := tensor_faults(weights.shapes, config):
        raise Refusal([f"{stored.path} does not hold the weights of its model:", *faults])
    dtype = dtype_named(options.dtype) if options.dtype else weights.dtype(next(iter(weights.shapes)))
    tokenizer, settings = _tokenizer_files(stored.manifest.extra)

    def read(name: str) -> Tensor:
        return weights.whole(name, dtype)

    with _progress(len(weights.shapes), read) as told:
        content = save_huggingface(
            target, config, told, dtype, options.family, settings, tokenizer, options.shard_bytes
        )  # fmt: skip
    family = content["model_type"]
    beside = ", with its tokenizer" if tokenizer else "; no tokenizer.json is known of it"
    skipped = [f"skipped {reason}" for reason in found.skipped]
    return [*skipped, f"{target}: {family}, {_described(config)}{beside}"]


def _tokenizer_files(extra: Mapping[str, Any]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Files beside the run's tokenizer.json for transformers' AutoTokenizer, and what config.json says of it."""
    from gridtron.core.data.sources import DataError
    from gridtron.core.data.tokenizers import load_tokenizer
    from gridtron.models.huggingface.folder import TOKENIZER_FILES

    data = extra.get("plan", {}).get("data", {})
    named = data.get("tokenizer") if isinstance(data, Mapping) else None
    if not isinstance(named, str) or named == "bytes" or not Path(named).is_file():
        return {}, {}
    path = Path(named)
    found = {name: (path.parent / name).read_bytes() for name in TOKENIZER_FILES if (path.parent / name).is_file()}
    ids = _special_ids(path.parent)
    found["tokenizer.json"] = path.read_bytes()
    try:
        end = load_tokenizer(named).end_of_document
    except DataError as fault:
        raise Refusal([str(fault)]) from None
    if "tokenizer_config.json" not in found:
        described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if end is not None:
            described["eos_token"] = load_tokenizer(named).decode([end])
        found["tokenizer_config.json"] = (json.dumps(described, indent=2) + "\n").encode()
    return found, {"eos_token_id": end, **ids}


def _special_ids(folder: Path) -> dict[str, Any]:
    """Ids that a config.json beside the tokenizer gives to its first, last and filling tokens."""
    from gridtron.models.huggingface.folder import CONFIG, read_json

    if not (folder / CONFIG).is_file():
        return {}
    try:
        settings = read_json(folder / CONFIG)
    except ValueError:
        return {}
    told = {key: settings.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {key: value for key, value in told.items() if value is not None}


# -------------------------------------------------------------------- both
def _described(config: GPTConfig) -> str:
    from gridtron.models.cost.parameters import total_parameters

    return f"{total_parameters(config):,} parameters in {config.num_layers} layers"


@contextmanager
def _progress(count: int, read: Read) -> Iterator[Read]:
    """``read``, with a bar over its calls on a terminal."""
    if not sys.stderr.isatty():
        yield read
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("tensors", total=count)

        def told(name: str) -> Tensor:
            tensor = read(name)
            progress.advance(task)
            return tensor

        yield told
