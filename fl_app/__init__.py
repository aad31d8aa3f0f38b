"""Foundations every half of Corolla shares: configuration, layout, wire, models, data, results and the command line."""
