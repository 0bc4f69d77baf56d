"""gridtron: Megatron-style parallelism primitives that compose.

The parts live in ``gridtron.core``, ``gridtron.parallel``, ``gridtron.models``, ``gridtron.conf`` and
``gridtron.tools``; imports run from the right of that list to the left and never back.
"""

__version__ = "0.1.0"
