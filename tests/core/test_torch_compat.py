"""What of torch is private or renamed is there, or is told by name."""

from typing import Any

import pytest
import torch
from parity import Case, build_engine
from ranks import run_ranks
from torch import nn

from gridtron.core import Grid
from gridtron.core.errors import JobError
from gridtron.core.torch_compat import fsdp_can_defer, norms_of, scale_
from gridtron.parallel import DataParallel

PARTS = [
    ("FSDPModule", "_get_fsdp_state"),
    ("FSDPState", "_root_post_backward_final_callback"),
    ("FSDPState", "_lazy_init"),
    ("FSDPParam", "accumulate_unsharded_grad_if_needed"),
    ("FSDPParam", "unsharded_param"),
]


def holder_of(name: str) -> Any:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_state

    return {"FSDPModule": FSDPModule, "FSDPState": _fsdp_state.FSDPState, "FSDPParam": _fsdp_param.FSDPParam}[name]


def test_this_torch_has_every_part_of_fsdp2_that_a_split_backward_pass_needs() -> None:
    missing = [f"{name}.{part}" for name, part in PARTS if not hasattr(holder_of(name), part)]
    assert not missing, f"torch {torch.__version__} has no {', '.join(missing)}"
    assert fsdp_can_defer()


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_where_one_is_missing_it_is_noticed(name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = holder_of(name)
    owner = next(kind for kind in holder.__mro__ if part in vars(kind))
    monkeypatch.delattr(owner, part)
    assert not fsdp_can_defer()


def refused_where_it_is_missing() -> list[str]:
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    kept = _fsdp_state.FSDPState._lazy_init
    del _fsdp_state.FSDPState._lazy_init
    try:
        with Grid.create(data=-1) as grid:
            with pytest.raises(ValueError, match="zero=3 under a schedule that splits") as by_hand:
                DataParallel(nn.Linear(3, 3), grid.data, zero=3, defer=True)
            # In a job: an error that is shown without a traceback.
            with pytest.raises(JobError, match="zero=3 under a schedule that splits") as in_a_job:
                build_engine(Case(grid={"data": 2}, zero=3, schedule="zb_h1", micro_batch_size=2), grid)
        assert in_a_job.value.agreed
        return [str(by_hand.value), str(in_a_job.value)]
    finally:
        _fsdp_state.FSDPState._lazy_init = kept


def test_zero_3_under_a_split_backward_pass_is_then_refused_by_name() -> None:
    for messages in run_ranks(refused_where_it_is_missing, 2):
        for message in messages:
            assert "use zero=2" in message and "1f1b" in message and len(message.splitlines()) < 12


@pytest.mark.parametrize("foreach", [True, False])
def test_norms_and_scaling_with_and_without_foreach(foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not foreach:
        monkeypatch.delattr(torch, "_foreach_norm")
        monkeypatch.delattr(torch, "_foreach_mul_")
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[1.0], [2.0], [2.0]])]
    assert [float(norm) for norm in norms_of(tensors)] == [5.0, 3.0]
    scale_(tensors, 0.5)
    assert tensors[0].tolist() == [1.5, 2.0] and tensors[1].tolist() == [[0.5], [1.0], [1.0]]
