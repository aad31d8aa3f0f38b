"""Code that all parts of Corolla share: configuration, layout, wire, models, data and results."""

from fl_app import earlier_names as earlier_names
