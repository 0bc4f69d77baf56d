"""The one door for a finished gradient, and weight gradients that are finished later than the input's.

A pipeline schedule may split a backward pass: the gradient of the input first (I), on which the stage before waits,
and the gradients of the weights later (W; Qi et al. 2023, arXiv:2401.10241). What is deferred ends in the same door as
what autograd accumulates, so that nobody who listens there has to know of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def accumulate_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """The one door for a finished gradient: to the DataParallel that holds ``parameter``, else into ``.grad``."""
    door = getattr(parameter, "gradient_door", None)
    if door is not None:
        door(parameter, gradient)
    else:
        add_to_grad(parameter, gradient)


def weakly(method: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A bound method that does not keep its object alive; once that is gone ``otherwise`` is called, or nothing.

    For hooks: a parameter keeps them where Python's garbage collector does not look, so that one that leads back to the
    parameter would keep both, and the process groups that the object holds, for ever.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        if found is not None:
            return found(*arguments)
        return None if otherwise is None else otherwise(*arguments)

    return call


def add_to_grad(parameter: nn.Parameter, gradient: Tensor) -> None:
    """As autograd would."""
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


Work = Callable[[], None]
"""Finishes gradients and hands them to the door."""


class Deferral:
    """Where the backward pass of a stage leaves its weights' gradients while they are deferred.

    Parameters name their Deferral (:meth:`watch`); layers that can wait ask :func:`deferral_of` in their backward.

    Attributes:
        active: whether a pass that runs now is to be split.
        able: parameters whose every product so far went through a layer that can wait.
    """

    def __init__(self) -> None:
        self.active = False
        self.able: set[Tensor] = set()
        self._work: list[Work] = []

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.deferral = self  # type: ignore[attr-defined]

    @contextmanager
    def splitting(self, active: bool) -> Iterator[None]:
        """Passes inside are split, or not."""
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before

    def push(self, work: Work) -> None:
        self._work.append(work)

    def take(self) -> list[Work]:
        """What was left since the last call, in order."""
        work, self._work = self._work, []
        return work


def deferral_of(*parameters: Tensor | None) -> Deferral | None:
    """The active Deferral that all of ``parameters`` (but None) share; None where nothing is to be deferred."""
    deferrals = {id(d): d for p in parameters if p is not None for d in (getattr(p, "deferral", None),)}
    deferral: Deferral | None = next(iter(deferrals.values()), None)
    return deferral if len(deferrals) == 1 and deferral is not None and deferral.active else None
