"""What ends a job for a reason that its user can mend: printed as a message, never as a traceback."""

from __future__ import annotations


class JobError(RuntimeError):
    """A job that had begun cannot go on: a full disk, a damaged checkpoint, another writer in the run's folder.

    Args:
        message: what happened, with the values, and what to change; a few lines.
        agreed: every rank raises the same message, so rank 0 alone prints it.
    """

    def __init__(self, message: str, agreed: bool = False):
        super().__init__(message)
        self.agreed = agreed
