"""Steps between a round's uploads and the method, and after it: two lists that a run's config makes.

Each step is a file with a function `step(config)`. It returns None if the config does not ask for the step. Outlier screening
(screening.py) comes before them: it sees the uploads where they were collected, and remembers earlier rounds.
"""

from __future__ import annotations

from fl_app.config import RunConfig
from strategies.base.state import StepAfter, StepBefore
from strategies.engine.steps import age, server_optimizer, size_weight


def before(config: RunConfig) -> list[StepBefore]:
    """Return the steps that change a round's uploads before the method sees them, in their order."""
    found = [module.step(config) for module in (size_weight, age)]
    return [step for step in found if step is not None]


def after(config: RunConfig) -> list[StepAfter]:
    """Return the steps that change the models that the method has made, in their order."""
    found = [module.step(config) for module in (server_optimizer,)]
    return [step for step in found if step is not None]
