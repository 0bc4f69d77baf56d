"""What the memory model is asked: refused where it does not fit, and what an optimizer's options change."""

from dataclasses import replace

import pytest
from parity import LLAMA

from gridtron.models.cost.memory import MemorySettings, rank_memory, rank_parameters


def test_settings_that_do_not_fit_are_all_told():
    with pytest.raises(ValueError) as fault:
        MemorySettings(
            replace(LLAMA, vocab_size=None), 24, data=4, zero=4, shard_size=3, precision="fp8", policies=("full",)
        )
    for words in ("zero=4", "shard_size=3 must divide data=4", "fp8", "vocab_size", "1 policies for 2 layers"):
        assert words in str(fault.value)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_muon_keeps_momentum_where_there_is_some(momentum):
    settings = MemorySettings(LLAMA, 24, optimizer="muon", momentum=momentum)
    count = rank_parameters(settings)
    assert rank_memory(settings).optimizer == 4 * ((momentum > 0) * count.matrices + 2 * count.others)
