"""A Flower app in JAX with a personalized method of Corolla."""
