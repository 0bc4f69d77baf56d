"""What a step cannot go below: its matrix products, each at its own shape, and nothing else."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gridtron.tools.bench.measure import Contender
from gridtron.tools.bench.plain import Shape
from gridtron.tools.bench.step import FLOOR


def products_alone(shape: Shape) -> Contender:
    """Forward product, input's and weight's gradient of every linear layer, and the six products of each causal
    attention (whole squares: what fused attention leaves out above the diagonal is counted), in one process."""
    tokens, hidden = shape.batch * shape.sequence, shape.hidden
    width = hidden // shape.heads
    kv = shape.key_value_heads * width
    layers = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)]
    layers += [(hidden, shape.ffn), (hidden, shape.ffn), (shape.ffn, hidden)]
    generator = torch.Generator().manual_seed(shape.seed)
    made: dict[tuple[int, ...], torch.Tensor] = {}

    def operand(*size: int) -> torch.Tensor:
        if size not in made:
            made[size] = torch.randn(size, generator=generator)
        return made[size]

    def linear(inside: int, outside: int) -> None:
        x, weight, gradient = operand(tokens, inside), operand(outside, inside), operand(tokens, outside)
        F.linear(x, weight)
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    def attention() -> None:
        heads = shape.batch * shape.heads
        rows, square = operand(heads, shape.sequence, width), operand(heads, shape.sequence, shape.sequence)
        for _ in range(2):  # scores, and the gradient of the weights
            torch.bmm(rows, rows.transpose(1, 2))
        for _ in range(4):  # the result, and the gradients of q, k and v
            torch.bmm(square, rows)

    def step(index: int) -> float:
        with torch.no_grad():
            for _ in range(shape.layers):
                for inside, outside in layers:
                    linear(inside, outside)
                attention()
            linear(hidden, shape.vocabulary)
        return 0.0

    return Contender(FLOOR, step, trains=False)
