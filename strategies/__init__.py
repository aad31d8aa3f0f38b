"""The methods, one file per paper, and their registry."""

from __future__ import annotations

from typing import Any

from strategies import fedavg, fedcac, local
from strategies.base import Method

METHODS: dict[str, Method[Any]] = {m.name: m for m in (fedavg.METHOD, local.METHOD, fedcac.METHOD)}

METHOD_PARAMS: dict[str, type] = {name: method.params for name, method in METHODS.items()}
