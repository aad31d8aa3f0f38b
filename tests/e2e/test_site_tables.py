"""Sites whose files differ, at real SuperNodes: each has its own signs, names, units, columns and order in its `site.toml`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tests.e2e.conftest import Cluster, corolla, rounds, settings, summary
from tests.experiments.months import cancer

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NAMES = ("celle", "uelzen", "verden")
SETTING: dict[str, Any] = {
    "method": "fedper",
    "dataset": "node",
    "target": "kind",
    "classes": "malignant,benign",
    "num-server-rounds": 2,
    "local-epochs": 1,
    "test-ratio": 0.5,
    "collect-personal-models": True,
    "available-timeout": 300.0,
}
# 2 ** -10: a change of unit that no rounding shows
OWN = (
    '[data]\nseparator = ";"\ndecimal = ","\nrename = {Flaeche = "mean area"}\nscale = {"mean area" = 0.0009765625}\n',
    '[data]\nseparator = "tab"\nfill = {"mean texture" = 19.0}\nexclude = ["foreman"]\n',
    "",
)


def written(k: int, plain: Path, to: Path) -> Path:
    """Write a site's table in its own way: another order of columns, and what its `site.toml` says."""
    frame = pd.read_csv(plain)
    # where all orders differ, the first client's is the run's
    if k:
        frame = frame[[frame.columns[i] for i in np.random.default_rng(k).permutation(len(frame.columns))]]
    if k == 0:
        frame["mean area"] *= 1024
        frame.rename(columns={"mean area": "Flaeche"}).to_csv(to, index=False, sep=";", decimal=",")
    elif k == 1:
        frame.loc[frame["mean texture"] == 19.0, "mean texture"] = np.nan
        frame.assign(foreman="x").to_csv(to, index=False, sep="\t")
    else:
        frame.assign(shift=frame.index % 3).to_csv(to, index=False)
    return to


def run(cluster: Cluster, tmp_path: Path, name: str, sites: Sequence[tuple[str, Path]], **more: Any) -> str:
    """Run with sites of these rules and data, each with a directory of its own. Return what was printed."""
    for k, (rules, path) in enumerate(sites):
        if f"site-{k}" in cluster.processes:
            cluster.kill(f"site-{k}")
            (cluster.home / f"site-{k}.log").unlink()
        cluster.start_site(k, 3, f'site-dir = "{tmp_path}/notes-{k}"\n{rules}', data_path=str(path), name=NAMES[k])
    cluster.wait_for_nodes()
    values = SETTING | {"output-dir": str(tmp_path), "state-dir": str(tmp_path / "state"), "run-name": name} | more
    words = ("run", "--superlink", "test", "--clients", "3", *settings(values))
    done = corolla(*words, environment=cluster.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.usefixtures("warm_cluster")
@pytest.mark.nightly
def test_sites_with_their_own_tables_train_as_sites_with_equal_ones(cluster: Cluster, tmp_path: Path) -> None:
    del cluster.environment["COROLLA_SITE_DIR"]
    cluster.start_superlink()
    plain = [cancer(tmp_path / f"{k}.csv", slice(k, None, 3)) for k in range(3)]
    frame = pd.read_csv(plain[1])
    frame.loc[::7, "mean texture"] = 19.0
    frame.to_csv(plain[1], index=False)
    run(cluster, tmp_path, "equal", [("", path) for path in plain])
    own = [written(k, path, tmp_path / f"{k}-own.csv") for k, path in enumerate(plain)]
    run(cluster, tmp_path, "own", list(zip(OWN, own, strict=True)))
    equal, other = tmp_path / "equal", tmp_path / "own"
    assert summary(other)["digest"] == summary(equal)["digest"]
    assert rounds(other)[-1]["evaluation"] == rounds(equal)[-1]["evaluation"]

    # each site's model predicts its own raw rows, and the same rows as the run has them
    for k, name in enumerate(NAMES):
        site = cluster.environment | {"COROLLA_SITE": str(tmp_path / f"site-{k}.toml")}
        to = tmp_path / "models" / name
        done = corolla("node", "export", "own", "--to", str(to), environment=site)
        assert done.returncode == 0, done.stdout + done.stderr
        done = corolla("export", str(other), "--client", name, "--to", str(to / "served"))
        assert done.returncode == 0, done.stdout + done.stderr
        answers = [
            corolla("predict", str(to / f"{name}.pt"), str(own[k]), "--json"),
            corolla(
                "predict", str(to / "served" / f"{name}.pt"), str(own[k]), "--site", site["COROLLA_SITE"], "--json"
            ),
            corolla("predict", str(to / "served" / f"{name}.pt"), str(plain[k]), "--json"),
        ]
        assert [done.returncode for done in answers] == [0, 0, 0], [done.stderr for done in answers]
        found = [json.loads(done.stdout) for done in answers]
        assert [one["measured"] for one in found[1:]] == [found[0]["measured"]] * 2 and found[0]["measured"]
        assert [row["class"] for row in found[0]["predictions"]] == [row["class"] for row in found[2]["predictions"]]


@pytest.mark.usefixtures("warm_cluster")
def test_machines_with_the_same_images_are_named(cluster: Cluster, tmp_path: Path) -> None:
    del cluster.environment["COROLLA_SITE_DIR"]
    cluster.start_superlink()
    folders = [tmp_path / f"images-{k}" for k in range(3)]
    for k in (0, 1):
        pixels = np.random.default_rng(k).integers(0, 256, (2, 8, 8, 8), np.uint8)
        for name, images in zip(("healthy", "ill"), pixels, strict=True):
            (folders[k] / "train" / name).mkdir(parents=True)
            for i, image in enumerate(images):
                Image.fromarray(image).save(folders[k] / "train" / name / f"{i}.png")
    shutil.copytree(folders[0], folders[2])
    # the same images, called something else
    for name in ("healthy", "ill"):
        (folders[2] / "train" / name / "0.png").rename(folders[2] / "train" / name / "z.png")
    more = {"method": "fedavg", "target": "", "classes": "healthy,ill", "num-server-rounds": 1}
    said = run(cluster, tmp_path, "images", [("", path) for path in folders], **more)
    assert "clients 0 (celle), 2 (verden) have the same data" in " ".join(said.split())
