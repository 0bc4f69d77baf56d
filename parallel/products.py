"""Autograd of the column- and row-parallel products: what is gathered, reduced and kept, and when.

Shoeybi et al. 2019 (arXiv:1909.08053, section 3), Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridtron.core.communication import Pending, all_gather, all_reduce, start_all_gather, start_all_reduce
from gridtron.core.grid import Axis
from gridtron.core.kernels.blocks import as_rows
from gridtron.core.once import differentiable_once
from gridtron.core.torch_compat import functional_all_reduce, functional_reduce_scatter
from gridtron.parallel.gradient_door import accumulate_gradient, deferral_of
from gridtron.parallel.overlap import gathered_products, scattered_products


class ColumnProducts(torch.autograd.Function):
    """``apply(x, axis, sequence_parallel, overlap, weight, bias, weight, bias, ...)``: one product a pair."""

    defers_weight_gradients = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, sequence_parallel: bool, overlap: str, *parameters: Tensor | None
    ) -> Any:
        ctx.axis, ctx.sequence_parallel, ctx.overlap = axis, sequence_parallel, overlap
        weights = cast(tuple[Tensor, ...], parameters[::2])
        # With sequence parallelism only the share is kept: the whole is gathered again for the weight's gradient.
        ctx.save_for_backward(x, *weights)
        ctx.deferral = deferral_of(*parameters)
        # Not those that are saved: a hook on saved tensors hands back others.
        ctx.parameters = parameters if ctx.deferral is not None else ()
        pairs = list(zip(weights, parameters[1::2], strict=True))
        if sequence_parallel:
            return tuple(gathered_products(x, [(weight.t(), bias) for weight, bias in pairs], axis, overlap)[1])
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        axis, needs = ctx.axis, ctx.needs_input_grad
        deferral = ctx.deferral if ctx.deferral is not None and ctx.deferral.active else None
        flat = [as_rows(gradient) for gradient in gradients]
        whole, gathered = x, None
        if ctx.sequence_parallel and deferral is None and any(needs[4:]):
            # It travels while the input's gradient is computed, and that one while the weights' are.
            whole, gathered = start_all_gather(x, axis)
        grad_x = reduced = None
        if needs[0]:
            grad_x, reduced = ColumnProducts._input_gradient(ctx, list(zip(gradients, weights, strict=True)))
        if gathered is not None:
            gathered.wait()
        grads: list[Tensor | None] = [None] * len(needs[4:])
        if deferral is not None:
            layers = list(zip(ctx.parameters[::2], ctx.parameters[1::2], flat, strict=True))
            deferral.push(partial(_finish_weights, x, axis if ctx.sequence_parallel else Axis("tensor"), layers))
        else:
            rows = as_rows(whole)
            for index, gradient in enumerate(flat):
                grads[2 * index] = gradient.t() @ rows if needs[4 + 2 * index] else None
                grads[2 * index + 1] = gradient.sum(0) if needs[5 + 2 * index] else None
        if reduced is not None:
            reduced.wait()
        return grad_x, None, None, None, *grads

    @staticmethod
    def _input_gradient(ctx: Any, factors: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Pending]:
        """The sum of (gradient of an output @ its weight) over the pairs and the axis, ready after wait()."""
        if ctx.sequence_parallel:
            return scattered_products(factors, ctx.axis, ctx.overlap)
        gradient, weight = factors[0]
        total = as_rows(gradient) @ weight
        for other, weight in factors[1:]:
            torch.addmm(total, as_rows(other), weight, out=total)
        total = total.view(*gradient.shape[:-1], weight.shape[1])
        return total, start_all_reduce(total, ctx.axis)


@torch.no_grad()  # the second half runs outside of any backward pass
def _finish_weights(x: Tensor, gathered: Axis, layers: list[tuple[Tensor, Tensor | None, Tensor]]) -> None:
    """The deferred half: gradients of (weight, bias) pairs from the input, gathered again over an axis, and that of
    the output as rows."""
    rows = as_rows(all_gather(x, gathered))
    for weight, bias, gradient in layers:
        if weight.requires_grad:
            accumulate_gradient(cast(nn.Parameter, weight), gradient.t() @ rows)
        if bias is not None and bias.requires_grad:
            accumulate_gradient(cast(nn.Parameter, bias), gradient.sum(0))


class RowProduct(torch.autograd.Function):
    """``apply(x, weight, axis, sequence_parallel, forward_sum, overlap)``: the product, summed over the axis."""

    defers_weight_gradients = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sequence_parallel: bool, forward_sum: str, overlap: str
    ) -> Tensor:
        ctx.axis, ctx.sequence_parallel, ctx.overlap = axis, sequence_parallel, overlap
        ctx.deferral = deferral_of(weight)
        ctx.parameter = weight if ctx.deferral is not None else None
        ctx.save_for_backward(x, weight)
        if forward_sum != "in_place" and axis.size > 1:
            y = F.linear(x, weight)
            total = (functional_reduce_scatter if sequence_parallel else functional_all_reduce)(y, axis.group)
            if forward_sum == "release":
                y.untyped_storage().resize_(0)
            return total
        if not sequence_parallel:
            return all_reduce(F.linear(x, weight), axis)
        share, reduced = scattered_products([(x, weight.t())], axis, overlap)
        reduced.wait()
        return share

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = grad_weight = None
        if ctx.sequence_parallel and needs_x:
            whole, (grad_x,) = gathered_products(gradient, [(weight, None)], ctx.axis, ctx.overlap, keep=True)
            gradient = cast(Tensor, whole)
        elif ctx.sequence_parallel:
            gradient = all_gather(gradient, ctx.axis)
        elif needs_x:
            grad_x = (as_rows(gradient) @ weight).view(x.shape)
        flat = as_rows(gradient)
        if ctx.deferral is not None and ctx.deferral.active:
            ctx.deferral.push(partial(_finish_weights, x, Axis("tensor"), [(ctx.parameter, None, flat)]))
        elif needs_weight:
            grad_weight = flat.t() @ as_rows(x)
        return grad_x, grad_weight, None, None, None, None
