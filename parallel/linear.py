"""Linear layers whose weight is split over a tensor axis (Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gridtron.core.grid import Axis
from gridtron.core.pieces import take_rows
from gridtron.core.random import draw_key, random_key, uniform_
from gridtron.core.sharding import Ranges, Sharding, even_ranges, nonempty
from gridtron.parallel.collectives import (
    copy_to_region,
    gather_from_region,
    gather_from_sequence,
    reduce_from_region,
    reduce_scatter_to_sequence,
)
from gridtron.parallel.gradient_door import deferral_of
from gridtron.parallel.overlap import overlap_fault
from gridtron.parallel.products import ColumnProducts, RowProduct

FORWARD_SUMS = ("in_place", "new", "release")


class TensorParallelLinear(nn.Module):
    """``y = x W^T + b`` with W split over one axis, by output ("column") or by input ("row") features.

    - column: ``x (..., in) -> (..., out share)``; the input's gradient is summed over the axis.
    - row: ``x (..., in share) -> (..., out)``; the output is summed over the axis and the bias added once, after.
    - sequence_parallel: the first dimension of the tensor outside the region is this rank's share of the sequence;
      column gathers it, row reduces and scatters it (Korthikanti et al. 2022, arXiv:2205.05198).

    Args:
        in_features, out_features: of the whole layer; shares need not be equal.
        axis: Axis, one-dimensional DeviceMesh, ProcessGroup, or None (whole).
        partition: "column" or "row".
        bias: add a bias; split with the output of a column layer, whole in a row layer.
        sequence_parallel: as above.
        gather_output: column only: return the whole output on every rank.
        init_method: called on the whole weight, of which the share is kept; default as torch.nn.Linear's
            distribution, drawn from one key that torch's default CPU generator gives, by global index, so that
            ``torch.manual_seed`` gives the same whole weight on every grid.
        device, dtype: of the parameters.
        rows: the ranges of split features that each rank holds, instead of even shares (attention heads).
        forward_sum: row only, how the product is summed over the axis: "in_place"; "new", a tensor of its own by
            torch's functional collectives, so that a selective checkpoint may keep both; "release", likewise, and the
            product's memory is let go at once, for a checkpoint that keeps both and never reads the product again.
        overlap: with sequence_parallel, how collectives hide behind products: "none"; "chunked", in pieces of the
            sequence; "symmetric_memory", by torch's fused operators on CUDA (:mod:`gridtron.parallel.overlap`).

    Raises:
        ValueError: an unknown partition, an overlap that this machine has not, or options that do not go together.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Any = None,
        partition: str = "column",
        bias: bool = True,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        rows: Sequence[Ranges] | None = None,
        forward_sum: str = "in_place",
        overlap: str = "none",
    ):
        super().__init__()
        if partition not in ("column", "row"):
            raise ValueError(f'partition={partition!r}: it is "column" (split the outputs) or "row" (split the inputs)')
        if gather_output and partition == "row":
            raise ValueError("gather_output=True goes with partition='column'; a row layer's output is whole already")
        if min(in_features, out_features) < 1:
            raise ValueError(f"in_features={in_features} and out_features={out_features} must be at least 1")
        self.axis = Axis.of(axis)
        self.in_features, self.out_features = in_features, out_features
        if forward_sum not in FORWARD_SUMS:
            raise ValueError(f"forward_sum={forward_sum!r}: it is one of {', '.join(FORWARD_SUMS)}")
        if fault := overlap_fault(overlap, forward_sum):
            raise ValueError(fault)
        self.partition, self.gather_output = partition, gather_output
        self.forward_sum, self.overlap = forward_sum, overlap
        self.sequence_parallel = sequence_parallel and self.axis.size > 1
        dim = 0 if partition == "column" else 1
        length = (out_features, in_features)[dim]
        if rows is None:
            rows = [nonempty(piece) for piece in even_ranges(length, self.axis.size)]
        weight = Sharding((out_features, in_features), dim, tuple(rows))
        self.shardings = {"weight": weight}
        self.weight = nn.Parameter(torch.empty(weight.local_shape(self.axis.rank), device=device, dtype=dtype))
        if bias:
            if partition == "column":
                self.shardings["bias"] = Sharding((out_features,), 0, tuple(rows))
            else:
                # With sequence parallelism the bias is added to this rank's share of the sequence only.
                self.shardings["bias"] = Sharding.whole((out_features,), partial=self.sequence_parallel)
            shape = self.shardings["bias"].local_shape(self.axis.rank)
            self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters(init_method)

    def reset_parameters(self, init_method: Callable[[Tensor], Any] | None = None) -> None:
        """Draws the weights anew: the whole weight is the same on every grid."""
        key = draw_key()
        bound = 1 / math.sqrt(self.in_features)
        if init_method is None:
            uniform_(self.weight, key, self.shardings["weight"], self.axis.rank, -bound, bound)
        elif self.weight.device.type != "meta":
            whole = torch.empty(self.shardings["weight"].shape, device=self.weight.device, dtype=self.weight.dtype)
            init_method(whole)
            with torch.no_grad():
                self.weight.copy_(take_rows(whole, self.shardings["weight"], self.axis.rank))
        if self.bias is not None:
            bias_key = random_key(key, "parameter", "bias")
            uniform_(self.bias, bias_key, self.shardings["bias"], self.axis.rank, -bound, bound)

    def forward(self, x: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch out"]:
        if self.partition == "column":
            (y,) = column_linear(x, [(self.weight, self.bias)], self.axis, self.sequence_parallel, self.overlap)
            if self.gather_output:
                lengths = tuple(self.shardings["weight"].local_shape(rank)[0] for rank in range(self.axis.size))
                y = gather_from_region(y, self.axis, -1, lengths)
            return y
        return row_linear(x, self.weight, self.bias, self.axis, self.sequence_parallel, self.forward_sum, self.overlap)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, {self.partition}, bias={self.bias is not None}, "
            f"{describe_share(self.shardings['weight'], self.axis)}"
        )


def describe_share(sharding: Sharding, axis: Axis) -> str:
    """ "rows 0:2048 of 4096, tensor 0 of 2", or "whole"."""
    if axis.size == 1 or sharding.dim is None:
        return "whole"
    held = " ".join(f"{start}:{stop}" for start, stop in sharding.ranges(axis.rank)) or "none"
    kind = "rows" if sharding.dim == 0 else "columns"
    return f"{kind} {held} of {sharding.shape[sharding.dim]}, {axis.name} {axis.rank} of {axis.size}"


# ---------------------------------------------------------------- the products
def column_linear(
    x: Float[Tensor, "*batch features"],
    layers: Sequence[tuple[Tensor, Tensor | None]],
    axis: Axis,
    sequence_parallel: bool = False,
    overlap: str = "none",
) -> tuple[Tensor, ...]:
    """Several column-parallel products of one input: one gather forward, one reduction of its gradient backward.

    Args:
        x: (..., in); with sequence_parallel this rank's share of the first dimension.
        layers: pairs (weight (out share, in), bias (out share) or None), as q, k and v.
        overlap: as TensorParallelLinear has it.

    Returns:
        One (..., out share) a layer.
    """
    if torch.compiler.is_compiling():
        # A graph for a compiler: it orders products and collectives itself, and no gradient is deferred. It keeps the
        # gathered input; a second gather in the backward pass is hoisted into the forward one (tried, torch 2.13).
        x = gather_from_sequence(x, axis) if sequence_parallel else copy_to_region(x, axis)
        return tuple(F.linear(x, *layer) for layer in layers)
    deferral = deferral_of(*(parameter for layer in layers for parameter in layer))
    if deferral is not None:
        deferral.able.update(weight for weight, _ in layers)
    elif len(layers) == 1 and axis.size == 1:
        return (F.linear(x, *layers[0]),)
    parameters = (parameter for layer in layers for parameter in layer)
    return ColumnProducts.apply(x, axis, sequence_parallel and axis.size > 1, overlap, *parameters)


def row_linear(
    x: Float[Tensor, "*batch share"],
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    sequence_parallel: bool = False,
    forward_sum: str = "in_place",
    overlap: str = "none",
) -> Float[Tensor, "*batch out"]:
    """Row-parallel product: (..., in share) -> (..., out), summed over the axis, the bias added once.

    ``forward_sum`` and ``overlap`` as TensorParallelLinear has them.
    """
    compiling = torch.compiler.is_compiling()
    deferral = None if compiling else deferral_of(weight)
    if deferral is not None:
        deferral.able.add(weight)
    elif axis.size == 1:
        return F.linear(x, weight, bias)
    if compiling:
        y = F.linear(x, weight)
        y = reduce_scatter_to_sequence(y, axis) if sequence_parallel else reduce_from_region(y, axis)
    else:
        y = RowProduct.apply(x, weight, axis, sequence_parallel and axis.size > 1, forward_sum, overlap)
    return y if bias is None else y + bias
