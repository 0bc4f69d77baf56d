"""Bytes that a kernel cannot do without: what it must read, read once, and what it must write, written once.

Pure functions of the shape: operation -> bytes of the forward pass, and of the forward and backward passes together.
What is kept for the backward pass counts as written and read; caches count nothing.
"""

from __future__ import annotations

from typing import NamedTuple

WIDE = 4
"""Bytes of a statistic: float32."""
INDEX = 8
"""Bytes of a target."""


class Passes(NamedTuple):
    """Bytes of the forward pass, and of both."""

    forward: int
    both: int


def rms_norm(rows: int, columns: int, itemsize: int) -> Passes:
    """x in, y out, one number a row; then the gradient and x in, the gradient of x out, and the weight's."""
    tensor, weight, statistic = rows * columns * itemsize, columns * itemsize, rows * WIDE
    forward = 2 * tensor + weight + statistic
    return Passes(forward, forward + 3 * tensor + 2 * weight + statistic)


def layer_norm(rows: int, columns: int, itemsize: int) -> Passes:
    """As rms_norm, with a bias and two numbers a row."""
    tensor, weight, statistic = rows * columns * itemsize, columns * itemsize, rows * WIDE
    forward = 2 * tensor + 2 * weight + 2 * statistic
    return Passes(forward, forward + 3 * tensor + 3 * weight + 2 * statistic)


def rope(batch: int, heads: int, sequence: int, width: int, itemsize: int) -> Passes:
    """Queries and keys of as many heads: in and out, and the tables; the same again for their gradients."""
    forward = 4 * batch * heads * sequence * width * itemsize + sequence * width * itemsize
    return Passes(forward, 2 * forward)


def swiglu(rows: int, columns: int, itemsize: int) -> Passes:
    """Gate and up in, the result out; then the gradient and both in, both gradients out."""
    tensor = rows * columns * itemsize
    return Passes(3 * tensor, 8 * tensor)


def bias_gelu(rows: int, columns: int, itemsize: int) -> Passes:
    """x and bias in, the result out; then the gradient, x and bias in, the gradients of both out."""
    tensor, bias = rows * columns * itemsize, columns * itemsize
    return Passes(2 * tensor + bias, 5 * tensor + 3 * bias)


def scaled_masked_softmax(batch: int, heads: int, length: int, itemsize: int) -> Passes:
    """Under the causal mask: scores of the past in, all weights out; then gradient and weights of the past in, all
    gradients out."""
    whole, past = length * length, length * (length + 1) // 2
    each = batch * heads * itemsize
    return Passes(each * (past + whole), each * (3 * past + 2 * whole))


def dropout_add(rows: int, columns: int, itemsize: int) -> Passes:
    """x and the residual in, the sum out; then the gradient in, that of x out (the residual's is the gradient)."""
    tensor = rows * columns * itemsize
    return Passes(3 * tensor, 5 * tensor)


def cross_entropy(rows: int, vocabulary: int, itemsize: int) -> Passes:
    """Logits in, then logits in and their gradient out; targets and three numbers a row."""
    tensor, row = rows * vocabulary * itemsize, rows * (INDEX + 3 * WIDE)
    return Passes(tensor + row, 3 * tensor + 2 * row)


def adamw(parameters: int, itemsize: int) -> int:
    """Gradient in; main weight and two moments in and out, in float32; the model's own weight out."""
    return parameters * (7 * WIDE + itemsize)


def linear_cross_entropy_flops(rows: int, features: int, vocabulary: int) -> Passes:
    """Not bytes: operations of the head's product, one forward and two backward; what chunks compute again does not
    count."""
    product = 2 * rows * features * vocabulary
    return Passes(product, 3 * product)
