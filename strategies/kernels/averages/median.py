"""The middle value of every parameter (Yin et al., ICML 2018)."""

from __future__ import annotations

from strategies.kernels.averages import ByColumn
from strategies.kernels.trimming import trimmed

RULE = ByColumn(lambda block, rows, num_byzantine: trimmed(block, rows, (len(rows) - 1) // 2))
