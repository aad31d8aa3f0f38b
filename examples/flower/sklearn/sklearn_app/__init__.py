"""A Flower app in NumPy and scikit-learn with a personalized method of Corolla."""
