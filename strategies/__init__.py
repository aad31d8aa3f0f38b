"""The methods, one file per paper."""

from __future__ import annotations

from strategies import (
    apfl,
    ditto,
    fedala,
    fedamp,
    fedavg,
    fedbabu,
    fedbn,
    fedcac,
    feddac,
    feddpa,
    fedgen,
    fedntd,
    fedobp,
    fedpake,
    fedper,
    fedprox,
    fedrep,
    fedselect,
    floco,
    flute,
    lg_fedavg,
    local,
    moon,
    pfedfda,
    pfedme,
)
from strategies.registry import Methods, Params

_MODULES = (
    fedavg, local, fedcac, feddac, fedpake, fedobp, fedprox, fedper, fedrep, fedbn, lg_fedavg, fedamp, ditto, pfedme,
    fedntd, moon, fedbabu, fedselect, apfl, pfedfda, fedgen, fedala, flute, floco, feddpa,
)  # fmt: skip

METHODS = Methods(_MODULES)

METHOD_PARAMS = Params(METHODS)
