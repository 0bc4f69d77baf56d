"""What cannot be assembled is said before memory is asked for."""

import pytest

from gridtron.conf.compose import compose
from gridtron.core import Grid
from gridtron.core.errors import JobError
from gridtron.tools.assemble import check_memory


@pytest.mark.parametrize("words", [["model.num_layers=1000000000"], ["model.vocab_size=10000000000"]])
def test_a_model_larger_than_the_machine(words):
    with pytest.raises(JobError, match=r"GiB at grid.tensor=1 and grid.pipeline=1, and cpu has .* GiB; choose a smaller model"):
        check_memory(compose(["model=tiny", *words]), Grid.create())


def test_a_model_that_fits():
    check_memory(compose(["model=gpt2_124m", "precision=fp64"]), Grid.create())
