"""One decoder layer: two residual branches, normed before (Radford et al. 2019; Touvron et al. 2023), one after the
other or side by side (Black et al. 2022, arXiv:2204.06745, section 2.1)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from gridtron.core.kernels.config import KernelsConfig
from gridtron.core.random import random_key
from gridtron.models.attention import Attention
from gridtron.models.config import GPTConfig
from gridtron.models.mlp import MLP
from gridtron.models.norm import build_norm
from gridtron.parallel import Dropout, SampleContext


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, on this rank's share of the sequence; with
    parallel_residual ``x + attention(norm(x)) + mlp(other_norm(x))``."""

    def __init__(
        self,
        config: GPTConfig,
        name: str,
        seed: int,
        recompute_core: bool,
        linear: dict[str, Any],
        kernels: KernelsConfig,
    ):
        super().__init__()
        self.parallel = config.parallel_residual
        axis, sequence_parallel = linear["axis"], linear["sequence_parallel"]
        norm = (config, axis, sequence_parallel, linear["device"], linear["dtype"], kernels)
        self.attention_norm = build_norm(*norm)
        self.attention = Attention(config, f"{name}.attention", seed, recompute_core, linear, kernels)
        self.mlp_norm = build_norm(*norm)
        self.mlp = MLP(config, linear, kernels)
        self.attention_dropout, self.mlp_dropout = (
            Dropout(
                config.dropout,
                random_key(seed, "dropout", f"{name}.{site}"),
                axis,
                sequence_parallel,
                batch_first=not config.sequence_first(sequence_parallel),
                backend=kernels.of("dropout_add"),
            )
            for site in ("attention_dropout", "mlp_dropout")
        )

    def forward(
        self,
        x: Float[Tensor, "*batch hidden"],
        tables: tuple[Tensor, Tensor] | None,
        context: SampleContext | None = None,
    ) -> Float[Tensor, "*batch hidden"]:
        attended = self.attention_dropout.add(self.attention(self.attention_norm(x), tables, context), x, context)
        read = x if self.parallel else attended
        return self.mlp_dropout.add(self.mlp(self.mlp_norm(read)), attended, context)
