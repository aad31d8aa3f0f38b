"""The methods, one file per paper."""

from __future__ import annotations

from strategies import (
    apfl,
    cfl,
    ditto,
    fedala,
    fedamp,
    fedas,
    fedavg,
    fedbabu,
    fedbn,
    fedcac,
    fedconcat,
    feddac,
    feddpa,
    feddwa,
    feddyn,
    fedem,
    fedfomo,
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
    ifca,
    lg_fedavg,
    local,
    moon,
    perfedmask,
    pfedfda,
    pfedgate,
    pfedme,
    scaffold,
)
from strategies.registry import Methods, Params

_MODULES = (
    fedavg, local, fedcac, feddac, fedpake, fedobp, fedprox, fedper, fedrep, fedbn, lg_fedavg, fedamp, ditto, pfedme,
    fedntd, moon, fedbabu, fedselect, apfl, pfedfda, fedgen, fedala, flute, floco, feddpa,
    feddyn, scaffold, feddwa, fedas, fedfomo, cfl, ifca, fedem, perfedmask, pfedgate,
    fedconcat,
)  # fmt: skip

METHODS = Methods(_MODULES)

METHOD_PARAMS = Params(METHODS)
