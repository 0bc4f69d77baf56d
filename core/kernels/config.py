"""Which implementation each local operation takes: options, and the rule behind "auto". Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gridtron.core.capabilities import Capabilities
from gridtron.core.options import option

BACKENDS = ("auto", "triton", "apex", "torch")

AVAILABLE: Mapping[str, tuple[str, ...]] = {
    "rms_norm": ("triton", "apex", "torch"),
    "layer_norm": ("triton", "apex", "torch"),
    "rope": ("triton", "torch"),
    "swiglu": ("triton", "torch"),
    "bias_gelu": ("triton", "torch"),
    "scaled_masked_softmax": ("triton", "apex", "torch"),
    "cross_entropy": ("triton", "torch"),
    "linear_cross_entropy": ("triton", "torch"),
    "dropout_add": ("triton", "torch"),
    "adamw": ("triton", "apex", "torch"),
}
"""Operation -> its implementations, the one that "auto" prefers first."""


def _own(operation: str) -> str | None:
    names = ", ".join(AVAILABLE[operation])
    return option(
        None, f"of {operation}: {names}, auto; null: kernels.backend", choices=("auto", *AVAILABLE[operation])
    )


@dataclass(frozen=True)
class KernelsConfig:
    """Which implementation the operations of :mod:`gridtron.core.kernels` take."""

    backend: str = option(
        "auto",
        "implementation of the local operations: the fastest that is there (auto), or Triton, NVIDIA apex or torch; "
        "an operation that apex does not have is torch's under apex",
        choices=BACKENDS,
    )
    rms_norm: str | None = _own("rms_norm")
    layer_norm: str | None = _own("layer_norm")
    rope: str | None = _own("rope")
    swiglu: str | None = _own("swiglu")
    bias_gelu: str | None = _own("bias_gelu")
    scaled_masked_softmax: str | None = _own("scaled_masked_softmax")
    cross_entropy: str | None = _own("cross_entropy")
    linear_cross_entropy: str | None = _own("linear_cross_entropy")
    dropout_add: str | None = _own("dropout_add")
    adamw: str | None = _own("adamw")
    chunked_loss: bool = option(
        False,
        "the head's product and the loss by chunks of tokens: logits are never held, for a third more work in the head",
    )

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: an implementation that an operation does not have, with those that it has.
        """
        known = {"backend": BACKENDS, **{name: (None, "auto", *names) for name, names in AVAILABLE.items()}}
        faults = [
            f"{name}={getattr(self, name)!r}: it is one of {', '.join(str(choice) for choice in choices)}"
            for name, choices in known.items()
            if getattr(self, name) not in choices
        ]
        if not isinstance(self.chunked_loss, bool):
            faults.append(f"chunked_loss={self.chunked_loss!r}: it is True or False")
        if faults:
            raise ValueError("; ".join(faults))

    def of(self, operation: str) -> str:
        """What an operation was asked to take: "auto", or a name among AVAILABLE[operation]."""
        wanted = getattr(self, operation) or self.backend
        return wanted if wanted == "auto" or wanted in AVAILABLE[operation] else "torch"


@dataclass(frozen=True)
class Choice:
    """What an operation takes, and why.

    Args:
        backend: "triton", "apex" or "torch".
        reason: one clause.
        fault: why that cannot run here; None where it can.
    """

    backend: str
    reason: str
    fault: str | None = None


def choose(config: KernelsConfig, operation: str, found: Capabilities) -> Choice:
    """The implementation that ``operation`` takes on a machine."""
    wanted = config.of(operation)
    if wanted != "auto":
        asked = f"kernels.{operation if getattr(config, operation) else 'backend'}"
        given = getattr(config, operation) or config.backend
        reason = f"{asked}={given}" + ("" if given == wanted else f", which has no {operation}")
        return Choice(wanted, reason, backend_fault(wanted, found))
    skipped: list[tuple[str, str]] = []
    for name in AVAILABLE[operation]:
        fault = backend_fault(name, found)
        if name == "triton" and fault is None and found.triton_interpreted:
            fault = "its interpreter is asked for by name only"
        if fault is None:
            return Choice(name, "auto" + "".join(f"; no {other}: {why}" for other, why in skipped))
        skipped.append((name, fault))
    raise AssertionError(operation)


def resolve(config: KernelsConfig, found: Capabilities) -> KernelsConfig:
    """The same with every operation's implementation named, for parts that are made once and called often."""
    chosen: dict[str, Any] = {name: choose(config, name, found).backend for name in AVAILABLE}
    return replace(config, **chosen)


def kernels_fault(config: KernelsConfig, found: Capabilities) -> str | None:
    """Why what was asked for cannot run on a machine, with what can; None where it can."""
    faults: dict[str, str] = {}
    for name in AVAILABLE:
        choice = choose(config, name, found)
        if choice.fault is not None:
            option_name = f"kernels.{name}" if getattr(config, name) else "kernels.backend"
            faults[f"{option_name}={choice.backend}: {choice.fault}"] = option_name
    return "; ".join(f"{fault}; nearest: {name}=auto" for fault, name in faults.items()) or None


def backend_fault(backend: str, found: Capabilities) -> str | None:
    """Why an implementation cannot run on a machine; None where it can."""
    if backend == "torch":
        return None
    if backend == "triton":
        if found.triton is None:
            return "Triton is not installed"
        return None if found.cuda_devices or found.triton_interpreted else "no CUDA device"
    assert backend == "apex", backend
    if found.apex is None:
        return "NVIDIA apex is not installed"
    if found.apex == "other":
        return "the apex that is installed is not NVIDIA's"
    return None if found.cuda_devices else "no CUDA device"


_NUMBERS_ON_CPU = 2**24
_NUMBERS_ON_DEVICE = 2**27


def chunk_rows(rows: int, share: int, device: str = "cuda") -> int:
    """Rows whose logits linear_cross_entropy holds at once: 64 MiB of them in float32 on a CPU, and enough to fill any
    other kind of device."""
    numbers = _NUMBERS_ON_CPU if device == "cpu" else _NUMBERS_ON_DEVICE
    return max(1, min(rows, numbers // max(1, share)))
