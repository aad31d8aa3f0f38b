"""Corolla: personalized federated learning on Flower."""
