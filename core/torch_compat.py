"""The only place for names that differ between the supported versions of torch, or are private in them.

Each is looked for, never assumed by version.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# Renamed in torch 2.13, where the old names warn.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
