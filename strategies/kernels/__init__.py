"""Computations that methods share: pure functions over flat vectors and stacks, without Flower or PyTorch."""

from strategies.kernels.aggregate import (
    RowSum,
    Stack,
    SummedRows,
    block_means,
    check_weights,
    distances_of_pairs,
    mean_block,
    mix,
    weighted_mean,
)
from strategies.kernels.averages import RULES
from strategies.kernels.blocks import COLUMNS, UNIT, for_blocks, in_order, one_thread
from strategies.kernels.parts import Part, head_slots
from strategies.kernels.robust import PLAIN, Averaging, capped, choosing, distances_to_median

__all__ = [
    "Averaging",
    "COLUMNS",
    "PLAIN",
    "Part",
    "RULES",
    "RowSum",
    "Stack",
    "SummedRows",
    "UNIT",
    "block_means",
    "capped",
    "check_weights",
    "choosing",
    "distances_of_pairs",
    "distances_to_median",
    "for_blocks",
    "head_slots",
    "in_order",
    "mean_block",
    "mix",
    "one_thread",
    "weighted_mean",
]
