"""Computations that methods share: pure functions over flat vectors and stacks, without Flower or PyTorch."""
