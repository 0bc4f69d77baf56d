"""A run's first weights, from elsewhere: the parameters and the main weights beside them, on any grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gridtron.conf.schema import Plan
from gridtron.conf.warm_start import find_source, stretched
from gridtron.core.errors import JobError

if TYPE_CHECKING:
    from gridtron.core.grid import Grid
    from gridtron.parallel.engine import TrainingEngine
    from gridtron.parallel.weights import WeightSource


def warm_start(plan: Plan, grid: Grid, engine: TrainingEngine, facts: dict[str, Any]) -> tuple[str, ...]:
    """Fills the weights of an engine that has not trained yet from ``checkpoint.init_from``; every rank calls it.

    Args:
        plan: of the run.
        grid: of the run.
        engine: its optimizer's states stay as they are: fresh.
        facts: of the run; where the weights came from is added.

    Returns:
        What to tell at the start.

    Raises:
        JobError: on every rank, what does not fit.
    """
    from gridtron.parallel.weights import agree, load_weights

    assert plan.checkpoint.init_from is not None
    source, weights = agree(lambda: _open(plan.checkpoint.init_from or ""), grid)
    try:
        load_weights(engine.model, weights, grid, str(source.path))
    except ValueError as fault:
        raise JobError(f"checkpoint.init_from={fault}", agreed=True) from None
    _fill_main_weights(engine, weights)
    facts["init_from"] = {"path": str(source.path), "kind": source.kind}
    began = f"weights from {source.path} ({source.kind}); the optimizer begins anew"
    return (began, *source.notes, *stretched(plan, source))


def _open(text: str) -> Any:
    source = find_source(text)
    return source, source.weights()


def _fill_main_weights(engine: TrainingEngine, weights: WeightSource) -> None:
    """Wide weights beside narrow ones take what the source has, not the parameters' rounded copies."""
    from gridtron.parallel.weights import fill

    for name, main in engine.optimizer.main.items():
        if main is not engine.optimizer.parameters[name]:
            fill(main.detach(), engine.pieces[name], weights, name)
    engine.optimizer.note_weights()
