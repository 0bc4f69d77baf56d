"""Optimizers over named parameters, with wide main weights where the model's are narrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gridtron.core.errors import JobError
from gridtron.core.kernels.adamw import TritonAdamW, fresh_state
from gridtron.core.kernels.backend import backend_of
from gridtron.core.optim.apex import ApexAdamW
from gridtron.core.optim.config import OptimizerConfig
from gridtron.core.optim.muon import Muon
from gridtron.core.pieces import Piece
from gridtron.core.precision import wide_dtype
from gridtron.core.sharding import Sharding

_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Classes of torch.optim that update each number by its own gradient and state alone."""


def decays(shape: Sequence[int]) -> bool:
    """Whether weight decay applies to a parameter of this global shape: not to biases and norms, which have one
    dimension, whatever part of them a rank updates."""
    return len(shape) > 1


class Optimizer:
    """torch's optimizer over main weights, its states known by the parameters' names.

    A parameter narrower than float32 has a main weight in float32, which the optimizer updates; the parameter is a
    rounded copy of it. Others are their own main weights. Where something else writes a parameter (loaded weights), the
    main weight follows at the next step.

    Args:
        parameters: what this rank updates of the trained ones, by name: its rows, or a flat range of them.
        config: which optimizer and its constants.
        build: makes the optimizer from parameter groups, in place of the one that ``config`` names. Called once more,
            on copies, where its states must be known before its first step.
        pieces: where each of ``parameters`` lies in the whole; None: each is whole, and none a hidden matrix.
        model_dtype: of the model's weights, where ``parameters`` are kept wider (ZeRO-3); None: theirs.
        adamw: implementation of AdamW: "torch"; "apex", where main weights are float32 on CUDA; "triton"; "auto",
            which is Triton on CUDA where it is installed.

    Raises:
        JobError: ``build`` gives an optimizer that looks at whole tensors, and a data rank holds only a part of them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
        pieces: Mapping[str, Piece] | None = None,
        model_dtype: torch.dtype | None = None,
        adamw: str = "torch",
    ):
        self.parameters = dict(parameters)
        self.pieces = dict(pieces or {name: Piece(Sharding.whole(p.shape)) for name, p in self.parameters.items()})
        for name, parameter in self.parameters.items():
            assert tuple(parameter.shape) == self.pieces[name].shape, (name, parameter.shape, self.pieces[name])
        self.main = {name: _main_weight(parameter) for name, parameter in self.parameters.items()}
        self._versions: dict[str, int] = {}
        self.note_weights()
        self._build = build
        self._groups = self._decay_groups(self.main, float(getattr(config, "weight_decay", 0.0)))
        self.inner: torch.optim.Optimizer | Muon | None = None
        self._written: set[str] = set()
        self._waiting: dict[str, dict[str, Any]] = {}
        self._numbers: dict[tuple[str, str], Tensor] = {}
        self._stateless: set[str] = set()
        if build is None:
            if self.main:
                self.inner = self._build_own(config, model_dtype, adamw)
            self.make_states()
        elif self._groups:
            self.inner = build(self._groups)
            _check_elementwise(self.inner, self.pieces)

    def _decay_groups(self, names: Iterable[str], weight_decay: float) -> list[dict[str, Any]]:
        """torch's parameter groups of the main weights of these names: with decay, and without."""
        groups: dict[float, list[nn.Parameter]] = {}
        for name in names:
            decay = weight_decay if decays(self.pieces[name].sharding.shape) else 0.0
            groups.setdefault(decay, []).append(self.main[name])
        return [{"params": groups[decay], "weight_decay": decay} for decay in sorted(groups, reverse=True)]

    def _build_own(
        self, config: OptimizerConfig, model_dtype: torch.dtype | None, adamw: str
    ) -> torch.optim.Optimizer | Muon:
        if config.name == "adamw":
            return self._adamw(self._groups, config, adamw)
        if config.name == "sgd":
            return torch.optim.SGD(self._groups, lr=config.lr, momentum=config.momentum)
        assert config.name == "muon", config.name
        matrices = [name for name in self.main if is_matrix(self.pieces[name])]
        rest = self._decay_groups([name for name in self.main if not is_matrix(self.pieces[name])], config.weight_decay)
        group = None
        if matrices:
            narrow = model_dtype or self.parameters[matrices[0]].dtype
            fast = narrow == torch.bfloat16 and self.main[matrices[0]].is_cuda
            group = {
                "params": [self.main[name] for name in matrices],
                "lr": config.lr,
                "weight_decay": config.weight_decay,
                "momentum": config.momentum,
                "ns_steps": config.ns_steps,
                # Weights in bf16 show no more of an update than that; without tensor cores bf16 is no faster.
                "dtype": torch.bfloat16 if fast else None,
            }
        pieces: dict[Tensor, Piece] = {self.main[name]: self.pieces[name] for name in matrices}
        return Muon(group, pieces, self._adamw(rest, config, adamw) if rest else None)

    def _adamw(self, groups: list[dict[str, Any]], config: OptimizerConfig, backend: str) -> torch.optim.Optimizer:
        constants: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        mains = {main for group in groups for main in group["params"]}
        backend = backend_of("adamw", backend, next(iter(mains)))
        if backend == "apex" and all(main.is_cuda and main.dtype == torch.float32 for main in mains):
            return ApexAdamW(groups, **constants)
        if backend != "triton":
            return torch.optim.AdamW(groups, **constants, fused=True)
        copies: dict[Tensor, Tensor] = {}
        for name, main in self.main.items():
            if main in mains and main is not self.parameters[name]:
                copies[main] = self.parameters[name]
                self._written.add(name)
        return TritonAdamW(groups, **constants, copies=copies)

    # ---------------------------------------------------------------- a step
    def step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """One update at the rate ``lr``; parameters without a gradient stay as they are."""
        if self.inner is None:
            return
        self.refresh()
        for group in self.inner.param_groups:
            group["lr"] = lr
        for name, main in self.main.items():
            main.grad = gradients.get(name)
        self.inner.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                main = self.main[name]
                main.grad = None
                if main is not parameter and name not in self._written:
                    parameter.copy_(main)
        self.note_weights()

    def refresh(self) -> None:
        """Main weights follow parameters that were written from outside since :meth:`note_weights`.

        Parameters in one buffer share its counter of writes, so that a counter which moved says only that something
        may have changed: the numbers decide, each for itself, and a number that is its main weight's rounded copy keeps
        that main weight.
        """
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                main = self.main[name]
                if main is not parameter and parameter._version != self._versions[name]:
                    same = main.to(parameter.dtype) == parameter
                    main.copy_(torch.where(same, main, parameter.to(main.dtype)))
                    self._versions[name] = parameter._version

    def note_weights(self) -> None:
        """The parameters are as the main weights say: what wrote them last was no load of other weights.

        For whoever writes them on the optimizer's behalf (a gather after a step); a call saves :meth:`refresh` a look.
        """
        self._versions = {name: parameter._version for name, parameter in self.parameters.items()}

    # ---------------------------------------------------------------- states
    def states(self) -> dict[str, dict[str, Tensor]]:
        """Every state tensor: parameter's name -> state's name -> tensor; main weights as "main".

        Of a parameter that is cut, they are one-dimensional like the part. A plain number of a foreign optimizer
        is a float64 tensor here, and :meth:`take_states` gives it back.
        """
        self.refresh()
        found: dict[str, dict[str, Tensor]] = {}
        self._numbers = {}
        for name, main in self.main.items():
            tensors: dict[str, Tensor] = {}
            for key, value in self._state_of(name).items():
                if isinstance(value, Tensor):
                    tensors[key] = value
                elif type(value) in (int, float):
                    tensors[key] = self._numbers[name, key] = torch.tensor(float(value), dtype=torch.float64)
            if main is not self.parameters[name]:
                tensors["main"] = main.detach()
            found[name] = tensors
        return found

    def _state_of(self, name: str) -> dict[str, Any]:
        main = self.main[name]
        if self.inner is not None and main in self.inner.state:
            return dict(self.inner.state[main])
        return self._waiting.get(name, {})

    def make_states(self) -> None:
        """Makes the states that torch would make at the first step, so that a checkpoint can fill them before."""
        if self.inner is None:
            return
        if self._build is not None:
            self._make_foreign_states()
            return
        for group in self.inner.param_groups:
            for main in group["params"]:
                if main not in self.inner.state:
                    self.inner.state[main] = _fresh_state(main, group)

    def _make_foreign_states(self) -> None:
        """What states a foreign optimizer has shows in a step: one of zero gradients, by a second one, on copies.

        They wait aside until they are filled: without a checkpoint the optimizer begins with none, as it would alone.
        """
        assert self.inner is not None and self._build is not None
        known = {*self._waiting, *self._stateless}
        if all(main in self.inner.state or name in known for name, main in self.main.items()):
            return
        copies = {name: nn.Parameter(main.detach().clone()) for name, main in self.main.items()}
        by_main = {main: copies[name] for name, main in self.main.items()}
        twin = self._build([{**group, "params": [by_main[main] for main in group["params"]]} for group in self._groups])
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
        for group in twin.param_groups:
            group["lr"] = 0.0
        twin.step()
        for name, copy in copies.items():
            if twin.state.get(copy):
                self._waiting[name] = dict(twin.state[copy])
            else:
                self._stateless.add(name)

    def take_states(self) -> None:
        """After the tensors of :meth:`states` were filled: the optimizer goes on with them; main weights are right."""
        self.note_weights()
        if self.inner is None:
            return
        for name, state in self._waiting.items():
            self.inner.state.setdefault(self.main[name], state)
        self._waiting = {}
        for (name, key), tensor in self._numbers.items():
            state = self.inner.state[self.main[name]]
            state[key] = type(state[key])(tensor.item())


def _main_weight(parameter: nn.Parameter) -> nn.Parameter:
    wide = wide_dtype(parameter.dtype)
    if wide == parameter.dtype:
        return parameter
    return nn.Parameter(parameter.detach().to(wide))


def _check_elementwise(inner: torch.optim.Optimizer, pieces: Mapping[str, Piece]) -> None:
    """Of a tensor that data ranks cut, an optimizer sees a flat range here: right only where numbers stand alone."""
    known = type(inner) in [getattr(torch.optim, name) for name in _ELEMENTWISE]
    if known or getattr(inner, "elementwise", False):
        return
    for name, piece in pieces.items():
        if piece.cuts is not None and piece.shards.size > 1:
            raise JobError(
                f"the optimizer {type(inner).__name__} is not known to update each number by its own gradient alone, "
                f"and {piece.shards.size} data ranks share the update of {name}, a flat range each; set "
                f"data_parallel.zero=0, or, if it is so, elementwise = True in the class",
                agreed=True,
            )


def is_matrix(piece: Piece) -> bool:
    """Whether Muon treats a parameter as a matrix; the rest it leaves to AdamW."""
    return piece.matrix and len(piece.sharding.shape) == 2


def _fresh_state(main: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    if "betas" in group:
        return fresh_state(main, main.device)
    if group.get("momentum"):
        return {"momentum_buffer": torch.zeros_like(main, memory_format=torch.preserve_format)}
    return {}
