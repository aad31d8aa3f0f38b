"""A table as hospitals have it, with what is hard about it: `write` makes the CSV file that the tests of tables read.

Six hospitals of unequal size. Columns: patient_id (another whole number in every row, in no order), hospital, age (26 to 86),
pressure (92 to 176), crp (empty in one row of twelve), ward (three words), smoker (True, False), admitted (a date), and outcome:
yes or no, a few of them written "Yes" and "no ". At Chur nobody's outcome is yes.
"""

from __future__ import annotations

import csv
from datetime import date, timedelta
from pathlib import Path

import numpy as np

HOSPITALS = ("Basel", "Bern", "Chur", "Genf", "Lugano", "Zug")
SHARES = (0.25, 0.22, 0.08, 0.2, 0.1, 0.15)
"""Of the rows, in the order of HOSPITALS."""

ONE_CLASS = "Chur"
FEATURES = ("age", "pressure", "crp", "ward", "smoker", "admitted")
HEADER = ("patient_id", "hospital", *FEATURES, "outcome")
WARDS = ("icu", "medicine", "surgery")
FIRST_DAY = date(2021, 1, 1)
DAYS = 1000


def write(path: Path, rows: int = 3000, seed: int = 0, *, odd_spellings: bool = True) -> Path:
    """Write the table to `path`, a CSV file; return that. The same rows and seed make the same bytes.

    odd_spellings: write about one "yes" in twenty as "Yes", one "no" in twenty as "no "; they are four classes to who reads them as
    they are.
    """
    stream = np.random.default_rng(seed)
    hospital = stream.choice(len(HOSPITALS), rows, p=SHARES)
    # every hospital has a patient, however few rows there are
    hospital[: len(HOSPITALS)] = np.arange(len(HOSPITALS))[:rows]
    patient = stream.choice(np.arange(100_000, 1_000_000), rows, replace=False)
    age = stream.integers(26, 87, rows)
    pressure = stream.integers(92, 177, rows)
    crp = stream.gamma(2.0, 8.0, rows).round(1)
    ward = stream.choice(len(WARDS), rows, p=(0.2, 0.5, 0.3))
    smoker = stream.random(rows) < 0.3
    day = stream.integers(0, DAYS, rows)

    # logit of yes: each column counts, and each hospital has its own level
    level = np.linspace(-0.6, 0.6, len(HOSPITALS))[hospital]
    risk = (age - 56) / 12 + (pressure - 134) / 20 + (crp - 16) / 10 + np.array([1.2, -0.4, 0.0])[ward]
    risk += np.where(smoker, 0.8, -0.3) + (day - DAYS / 2) / DAYS + level
    yes = stream.random(rows) < 1 / (1 + np.exp(-risk))
    yes &= hospital != HOSPITALS.index(ONE_CLASS)

    odd = (stream.random(rows) < 0.05) & odd_spellings
    empty = stream.random(rows) < 1 / 12
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for k in range(rows):
            outcome = ("Yes" if odd[k] else "yes") if yes[k] else ("no " if odd[k] else "no")
            writer.writerow(
                (
                    patient[k],
                    HOSPITALS[hospital[k]],
                    age[k],
                    pressure[k],
                    "" if empty[k] else crp[k],
                    WARDS[ward[k]],
                    bool(smoker[k]),
                    FIRST_DAY + timedelta(days=int(day[k])),
                    outcome,
                )
            )
    return path
