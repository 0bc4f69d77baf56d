"""SIGTERM and SIGUSR1: what a scheduler sends before it ends a job, as a wish to save and stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

ASKED_BY: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Notes these signals while it is entered, in place of what they would do; a second one changes nothing.

    Slurm sends SIGUSR1 (``--signal=USR1@60``) and SIGTERM later: that must not break the save which the first began.

    Attributes:
        asked: the first signal that came; None before.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        # Only the main thread may set handlers; a loop elsewhere is stopped by who started it.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in ASKED_BY}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number)

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
