"""The mean of every parameter without its lowest and highest values, one of each for a Byzantine client (Yin et al., ICML 2018)."""

from __future__ import annotations

from strategies.kernels.averages import ByColumn
from strategies.kernels.trimming import trimmed

RULE = ByColumn(trimmed, counts_byzantine=True)
