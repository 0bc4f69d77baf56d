"""Transfers between this rank and its neighbours in a pipeline, whatever tensors a stage gives and takes.

A receive can be posted ahead only where the shapes are known. Those of a gradient are: they are those of what was sent.
Those of an activation are known once a microbatch of the same input shapes went that way; until then the activation
travels behind its description, over the processors' memory, where messages have tags and need no order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gridtron.core.communication import Pending, start_receive, start_send
from gridtron.core.grid import Axis
from gridtron.parallel.pipeline.program import Transfer

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True)
class Spec:
    """What must be known of a tensor before it is received."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        return Spec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        trained = "" if self.requires_grad else ", no gradient"
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}{trained}"


Specs = tuple[Spec, ...]


class Channel:
    """One rank's sends and receives.

    Args:
        axis: the pipeline axis.
        host: the same ranks with a group for tensors on the CPU.
        device: where tensors live.
    """

    def __init__(self, axis: Axis, host: Axis, device: torch.device):
        self.axis, self.host, self.device = axis, host, device
        # By (signature of the microbatch, stage). What a call learns serves from the next one on: then the two ranks of
        # a transfer agree on what was known before it.
        self._known: dict[tuple[int, int], Specs] = {}
        self._learned: dict[tuple[int, int], Specs] = {}
        self._signatures: Sequence[int] = ()
        self._tags: dict[Transfer, int] = {}
        self._sends: list[tuple[list[Pending], Sequence[Tensor]]] = []
        self._receives: dict[Transfer, tuple[list[Pending], list[Tensor]]] = {}

    def begin(self, signatures: Sequence[int], transfers: Sequence[Transfer]) -> None:
        """A new call: ``signatures`` tell the input shapes of each microbatch apart, equally on every rank."""
        self._signatures = signatures
        # Tag 0 is for what travels in the pair's order.
        self._tags = {transfer: number + 1 for number, transfer in enumerate(transfers)}
        assert not self._receives and not self._sends, "a call before left transfers behind"

    # ---------------------------------------------------------------- sending
    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Starts sending, and lets go of what has arrived meanwhile."""
        self._sends = [item for item in self._sends if not all(map(_is_done, item[0]))]
        specs = tuple(Spec.of(tensor) for tensor in tensors)
        payload = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
        known = self._specs_of(transfer, specs)
        if known is None:
            tag = self._tags[transfer]
            words = torch.tensor(_encode(specs), dtype=torch.int64)
            payload = [torch.tensor([len(words)]), words, *(tensor.cpu() for tensor in payload)]
            works = [start_send(t, self.host, transfer.target, tag) for t in payload if t.numel()]
        else:
            works = [start_send(t, self.axis, transfer.target) for t in payload if t.numel()]
        self._sends.append((works, payload))

    def _specs_of(self, transfer: Transfer, specs: Specs) -> Specs | None:
        """The description that the other rank has already; None where it has none.

        Raises:
            ValueError: a stage gives other tensors than before for inputs of the same shapes.
        """
        if transfer.kind == "gradient":
            return specs
        key = (self._signatures[transfer.microbatch], transfer.stage)
        known = self._known.get(key)
        if known is None:
            self._learned[key] = specs
        elif known != specs:
            raise ValueError(
                f"stage {transfer.stage} gives {_show(specs)} for microbatch {transfer.microbatch}, and gave "
                f"{_show(known)} for inputs of the same shapes before; what a stage gives must follow from the shapes "
                "of its inputs"
            )
        return known

    # ---------------------------------------------------------------- receiving
    def post(self, transfer: Transfer, specs: Specs | None) -> None:
        """Posts the receive, where the shapes are known: ``specs`` of a gradient, or those learned of an activation."""
        if specs is None:
            specs = self._known.get((self._signatures[transfer.microbatch], transfer.stage))
        if specs is not None:
            tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]
            works = [start_receive(t, self.axis, transfer.source) for t in tensors if t.numel()]
            self._receives[transfer] = (works, _with_grad(tensors, specs))

    def wait(self, transfer: Transfer) -> list[Tensor]:
        """The tensors, once they are here."""
        if transfer in self._receives:
            works, tensors = self._receives.pop(transfer)
            for work in works:
                work.wait()
            return tensors
        tag, source = self._tags[transfer], transfer.source

        def receive(tensor: Tensor) -> Tensor:
            if tensor.numel():
                start_receive(tensor, self.host, source, tag).wait()
            return tensor

        length = int(receive(torch.zeros(1, dtype=torch.int64)))
        specs = _decode(receive(torch.zeros(length, dtype=torch.int64)).tolist())
        self._learned[self._signatures[transfer.microbatch], transfer.stage] = specs
        tensors = [receive(torch.empty(spec.shape, dtype=spec.dtype)).to(self.device) for spec in specs]
        return _with_grad(tensors, specs)

    def abandon(self) -> None:
        """Forgets a call that failed; its neighbours fail too, unless this is the only rank."""
        self._sends, self._receives = [], {}
        self._learned.clear()

    def finish(self) -> None:
        """Waits for what is still on its way out."""
        for works, _ in self._sends:
            for work in works:
                work.wait()
        self._sends = []
        self._known.update(self._learned)
        self._learned.clear()


def greet(axis: Axis, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
    """One small message over each pair, in one order: NCCL makes a pair's communicator when both first speak."""
    for low, high in sorted(pairs):
        token = torch.zeros(1, device=device)
        if axis.rank == low:
            start_send(token, axis, high).wait()
        elif axis.rank == high:
            start_receive(token, axis, low).wait()


def _is_done(work: Pending) -> bool:
    check: Callable[[], bool] = getattr(work, "is_completed", lambda: False)
    return check()


def _with_grad(tensors: list[Tensor], specs: Specs) -> list[Tensor]:
    return [tensor.requires_grad_(spec.requires_grad) for tensor, spec in zip(tensors, specs, strict=True)]


def _show(specs: Specs) -> str:
    return ", ".join(map(str, specs)) or "nothing"


def _encode(specs: Specs) -> list[int]:
    words = [len(specs)]
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ValueError(
                f"a stage gives a tensor of {spec.dtype}, which cannot travel; convert it inside the stage"
            )
        words += [_DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape]
    return words


def _decode(words: list[int]) -> Specs:
    count, place = words[0], 1
    specs = []
    for _ in range(count):
        dtype, requires_grad, dims = words[place : place + 3]
        place += 3
        specs.append(Spec(tuple(words[place : place + dims]), _DTYPES[dtype], bool(requires_grad)))
        place += dims
    return tuple(specs)


def signature(specs: Any) -> int:
    """63 bits that tell shapes and dtypes apart, equal in every process."""
    return int.from_bytes(hashlib.sha256(repr(specs).encode()).digest()[:8], "little") >> 1
