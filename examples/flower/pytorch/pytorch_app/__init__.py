"""A Flower app in PyTorch with a personalized method of Corolla."""
