"""What runs a method: its rounds, plain or private."""
