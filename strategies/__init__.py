"""The methods, one file per paper: the four papers here, all others in `baselines`."""

from __future__ import annotations

import pkgutil
from pathlib import Path

from fl_app import earlier_names
from strategies.registry import Methods, Params

earlier_names.accept(
    {
        f"strategies.{module.name}": f"strategies.{folder}.{module.name}"
        for folder in ("baselines", "kernels")
        for module in pkgutil.iter_modules([str(Path(__file__).parent / folder)])
    }
)
earlier_names.accept({"strategies.overview": "strategies.method_tables"})

METHODS = Methods(
    (
        "fedavg",
        "local",
        "fedcac",
        "feddac",
        "fedpake",
        "fedobp",
        "fedprox",
        "fedper",
        "fedrep",
        "fedbn",
        "lg-fedavg",
        "fedamp",
        "ditto",
        "pfedme",
        "fedntd",
        "moon",
        "fedbabu",
        "fedselect",
        "apfl",
        "pfedfda",
        "fedgen",
        "fedala",
        "flute",
        "floco",
        "feddpa",
        "feddyn",
        "scaffold",
        "feddwa",
        "fedas",
        "fedfomo",
        "cfl",
        "ifca",
        "fedem",
        "perfedmask",
        "pfedgate",
        "fedconcat",
        "perfedavg",
        "fedrod",
        "fedproto",
        "apple",
        "fedpac",
        "pfedsim",
        "adabest",
        "heterofl",
        "pfedhn",
        "pfedla",
        "fedma",
        "favor",
    )
)

METHOD_PARAMS = Params(METHODS)
