"""Time on a device by its own events, in alternation, and within a budget."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Work = Callable[[], object]
Measure = Callable[[Mapping[str, Work]], dict[str, float]]
"""Name -> what runs, to name -> median seconds of one run."""

_FLUSH_BYTES = 2**32


class Budget:
    """Seconds that are left of a whole.

    Args:
        seconds: the whole.
        now: the clock.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self.now, self.end, self.start = now, now() + seconds, now()

    @property
    def left(self) -> float:
        return self.end - self.now()

    @property
    def spent(self) -> float:
        return self.now() - self.start

    def part(self, share: float) -> Budget:
        """A share of what is left."""
        return Budget(share * self.left, self.now)


def device_measure(rounds: int, warmup: int, budget: Budget) -> Measure:
    """Runs contenders in turn on the current CUDA device, in an order that turns by one place a round; fewer rounds
    where the budget ends, one at least.

    Before each run a buffer larger than any cache is cleared, as triton.testing.do_bench does: nothing is found in the
    second-level cache, and the device is busy while the host prepares the launches, so that events see the device's
    time alone. do_bench itself does not alternate.
    """
    import torch

    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def measure(contenders: Mapping[str, Work]) -> dict[str, float]:
        pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in contenders}
        for _ in range(warmup):
            for run in contenders.values():
                run()
        names = list(contenders)
        for turn in range(rounds):
            if turn and budget.left <= 0:
                break
            first = turn % len(names)
            for name in [*names[first:], *names[:first]]:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                flush.zero_()
                begin.record()
                contenders[name]()
                end.record()
                pairs[name].append((begin, end))
            # The host does not run ahead by more than a round.
            torch.cuda.synchronize()
        return {
            name: statistics.median(begin.elapsed_time(end) / 1000 for begin, end in events)
            for name, events in pairs.items()
        }

    return measure
