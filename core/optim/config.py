"""Options of the optimizer and of the learning rate's schedule."""

from __future__ import annotations

from dataclasses import dataclass

from gridtron.core.options import option


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = option("adamw", "which optimizer", choices=("adamw", "sgd", "muon"))
    lr: float = option(3e-4, "learning rate after warm-up", minimum=0)
    betas: tuple[float, float] = option(
        (0.9, 0.95), "AdamW, and Muon's for what is no hidden matrix: decay of the two moments", minimum=0, below=1
    )
    eps: float = option(1e-8, "AdamW: added to the root of the second moment", above=0)
    weight_decay: float = option(0.1, "decoupled decay; biases and norms have none", minimum=0)
    momentum: float = option(0.0, "SGD, Muon: momentum (Muon's is Nesterov's)", minimum=0, below=1)
    ns_steps: int = option(5, "Muon: Newton-Schulz steps that make an update orthogonal", minimum=1, maximum=20)
    grad_clip: float = option(1.0, "largest norm of the whole gradient; 0: off", minimum=0)


@dataclass(frozen=True)
class LRScheduleConfig:
    name: str = option("cosine", "shape of the decay", choices=("cosine", "linear", "wsd", "constant"))
    warmup_steps: int = option(0, "steps of linear warm-up from 0; cut, with a warning, to train.steps", minimum=0)
    decay_steps: int | None = option(
        None,
        "cosine, linear: steps from the warm-up's end to the lowest rate; wsd: the last so many steps; "
        "null: to the last step (wsd: a tenth of all)",
        minimum=0,
    )
    min_ratio: float = option(0.1, "lowest rate as a share of optimizer.lr", minimum=0, maximum=1)
