"""The methods, one file per paper, and their registry."""

from __future__ import annotations

from typing import Any

from strategies import (
    apfl,
    ditto,
    fedamp,
    fedavg,
    fedbabu,
    fedbn,
    fedcac,
    feddac,
    fedntd,
    fedobp,
    fedpake,
    fedper,
    fedprox,
    fedrep,
    fedselect,
    floco,
    lg_fedavg,
    local,
    moon,
    pfedfda,
    pfedme,
)
from strategies.base import Method

_MODULES = (
    fedavg, local, fedcac, feddac, fedpake, fedobp, fedprox, fedper, fedrep, fedbn, lg_fedavg, fedamp, ditto, pfedme,
    fedntd, moon, fedbabu, fedselect, apfl, pfedfda, floco,
)  # fmt: skip

METHODS: dict[str, Method[Any]] = {module.METHOD.name: module.METHOD for module in _MODULES}

METHOD_PARAMS: dict[str, type] = {name: method.params for name, method in METHODS.items()}

SUMMARIES: dict[str, str] = {m.METHOD.name: (m.__doc__ or "").strip().splitlines()[0] for m in _MODULES}
