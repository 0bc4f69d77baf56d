"""Local passes of the head's product and the cross-entropy together, by chunks of rows: the logits are never held.

The chunks go through the passes of ``cross_entropy``; ``parallel.linear_loss`` puts the reductions between them, one
for all chunks. (Wijmans et al. 2024, arXiv:2411.09009, go without logits in another way: by tiles in registers.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gridtron.core.kernels.backend import backend_of
from gridtron.core.kernels.cross_entropy import Statistics, exponents_of, gradient, statistics
from gridtron.core.precision import wide_dtype


def chunked_statistics(
    x: Float[Tensor, "rows features"],
    weight: Float[Tensor, "share features"],
    local: Int[Tensor, "rows"],
    chunk: int,
    backend: str = "auto",
) -> Statistics:
    """As ``cross_entropy.statistics`` of ``x weight^T``; nothing is kept.

    Args:
        local: index of each row's target in this share, or ELSEWHERE or IGNORED.
        chunk: rows at once.

    Raises:
        ValueError: an unknown backend.
    """
    backend = backend_of("linear_cross_entropy", backend, x)
    wide = wide_dtype(x.dtype)
    maximum, total, logit = (x.new_empty(x.shape[0], dtype=wide) for _ in range(3))
    for first in range(0, x.shape[0], chunk):
        part = slice(first, first + chunk)
        _, maximum[part], total[part], logit[part] = statistics(F.linear(x[part], weight), local[part], True, backend)
    return Statistics(x.new_empty(0, 0), maximum, total, logit)


def chunked_gradients(
    x: Float[Tensor, "rows features"],
    weight: Float[Tensor, "share features"],
    maximum: Float[Tensor, "rows"],
    factor: Float[Tensor, "rows"],
    row_weight: Float[Tensor, "rows"],
    local: Int[Tensor, "rows"],
    chunk: int,
    for_x: bool = True,
    for_weight: bool = True,
    backend: str = "auto",
) -> tuple[Float[Tensor, "rows features"] | None, Float[Tensor, "share features"] | None]:
    """Gradients of (x, weight), each None where it is not asked for: the logits are computed again, chunk by chunk.

    The weight's is summed over chunks in the wide dtype.

    Args:
        maximum: of each row in this share, as :func:`chunked_statistics` gives it.
        factor, row_weight: as ``cross_entropy.gradient`` has factor and weight.
    """
    backend = backend_of("linear_cross_entropy", backend, x)
    wide = wide_dtype(x.dtype)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if for_x else None
    grad_weight = torch.zeros(weight.shape, dtype=wide, device=x.device) if for_weight else None
    for first in range(0, x.shape[0], chunk):
        part = slice(first, first + chunk)
        logits = F.linear(x[part], weight)
        kept = logits
        if backend == "torch":
            kept = exponents_of(
                logits, maximum[part], logits if x.dtype == wide else logits.new_empty(logits.shape, dtype=wide)
            )
        grad = gradient(
            kept, maximum[part], factor[part], row_weight[part], local[part], x.dtype, inplace=True, backend=backend
        )
        if grad_x is not None:
            torch.mm(grad, weight, out=grad_x[part])
        if grad_weight is not None:
            if x.dtype == wide:
                grad_weight.addmm_(grad.t(), x[part])
            else:
                grad_weight.add_(grad.t() @ x[part])
    return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype)
