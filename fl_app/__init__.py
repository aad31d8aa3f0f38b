"""Code that all parts of Corolla share: configuration, layout, wire, models, data and results."""
