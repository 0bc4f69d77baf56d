"""``python -m gridtron`` and ``torchrun -m gridtron``: the same door as the ``gridtron`` command."""

from gridtron.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
