"""The yardstick: a Llama-like decoder in plain PyTorch, its tokens, weights and optimizer, shared by all contenders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """What is trained, and on how much a step.

    Args:
        batch: sequences a step, in one microbatch.
        sequence: tokens a sequence.
    """

    vocabulary: int = 8192
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    key_value_heads: int = 8
    ffn: int = 1408
    sequence: int = 256
    batch: int = 8
    theta: float = 10000.0
    eps: float = 1e-5
    lr: float = 3e-4
    seed: int = 1234


SHAPES = {
    "full": Shape(),
    "tiny": Shape(vocabulary=101, hidden=32, layers=2, heads=4, key_value_heads=2, ffn=48, sequence=16),
    "small": Shape(vocabulary=2048, hidden=256, heads=4, key_value_heads=4, ffn=704, sequence=128),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.width = shape.hidden // shape.heads
        self.grouped = shape.key_value_heads != shape.heads
        kv = shape.key_value_heads * self.width
        self.wq = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.wk = nn.Linear(shape.hidden, kv, bias=False)
        self.wv = nn.Linear(shape.hidden, kv, bias=False)
        self.wo = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, tables: Tensor) -> Tensor:
        batch = x.shape[0]
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        length = q.shape[1]  # with DTensor's sequence parallelism the projections gather the sequence
        q, k, v = (t.view(batch, length, -1, self.width).transpose(1, 2) for t in (q, k, v))
        q, k = turn(q, tables), turn(k, tables)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


def turn(x: Tensor, tables: Tensor) -> Tensor:
    """Rotary positions on (batch, heads, sequence, width)."""
    cos, sin = tables[0].to(x.dtype), tables[1].to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class MLP(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.w1 = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.w3 = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.w2 = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.n1, self.attn = nn.RMSNorm(shape.hidden, eps=shape.eps), Attention(shape)
        self.n2, self.mlp = nn.RMSNorm(shape.hidden, eps=shape.eps), MLP(shape)

    def forward(self, x: Tensor, tables: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x), tables)
        return x + self.mlp(self.n2(x))


class PlainGPT(nn.Module):
    """What one would write without any toolkit."""

    tables: Tensor

    def __init__(self, shape: Shape):
        super().__init__()
        self.tok = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(shape.layers)})
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        width = shape.hidden // shape.heads
        frequencies = 1.0 / shape.theta ** (torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(shape.sequence).float(), frequencies)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("tables", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for block in self.layers.values():
            x = block(x, self.tables)
        return self.head(self.norm(x))


def plain_model(shape: Shape) -> PlainGPT:
    """The same weights wherever it is called."""
    torch.manual_seed(shape.seed)
    model = PlainGPT(shape)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def tokens_of(shape: Shape, step: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of a step, each (batch, sequence)."""
    generator = torch.Generator().manual_seed(shape.seed + 1 + step)
    drawn = torch.randint(0, shape.vocabulary, (shape.batch, shape.sequence + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def adamw(parameters: Iterable[nn.Parameter], shape: Shape) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=shape.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
