"""The methods, one file per paper: the four papers here, all others in `baselines`."""

from __future__ import annotations

from strategies.registry import Methods, Params

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
        "partialfed",
    )
)

METHOD_PARAMS = Params(METHODS)
