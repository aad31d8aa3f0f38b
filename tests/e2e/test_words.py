"""What a server keeps of sites with a bad cell, a missing one and another word: nothing of the cell, in any file."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy import audit
from tests.e2e.conftest import BackgroundRun, Cluster, rounds
from tests.privacy.keys import make

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CELL, WORD = "John Smith 1957-03-02", "Xanthippe"
ROWS = 60
CONFIG: dict[str, Any] = {
    "method": "fedavg",
    "model": "mlp",
    "dataset": "node",
    "target": "state",
    "classes": "well,ill",
    "categorical": "ward=a|b",
    "num-server-rounds": 1,
    "checkpoint-every": 1,
    "min-available-clients": 3,
    "available-timeout": 300.0,
}
PROMISES: dict[str, dict[str, Any]] = {
    "private": {"private": True},
    "dp": {"dp-epsilon": 8.0, "dp-delta": 1e-3},
}


def table(directory: Path, client_id: int, **changed: str) -> Path:
    """A site's table, with other values in its row 17."""
    rows = [{"age": f"{20.5 + k}", "ward": "ab"[k % 2], "state": ("well", "ill")[k // 2 % 2]} for k in range(ROWS)]
    rows[15] |= changed
    path = directory / f"patients-{client_id}.csv"
    path.write_text("\n".join(["age,ward,state", *(",".join(row.values()) for row in rows)]) + "\n")
    return path


def kept(*places: Path) -> bytes:
    """All bytes of some files and directories, those in archives unpacked."""
    found = []
    for path in (file for place in places for file in (place, *place.rglob("*")) if file.is_file()):
        found.append(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                found += [archive.read(name) for name in archive.namelist()]
    return b"\n".join(found)


@pytest.mark.usefixtures("warm_cluster")
def test_nothing_of_a_cell_is_kept_outside_its_site(cluster: Cluster, tmp_path: Path) -> None:
    """Sites 3 to 5 differ in one cell from the others. Site 3 lets details leave, site 4 counts its samples first."""
    data = tmp_path / "records-of-patients"
    data.mkdir()
    changed: list[dict[str, str]] = [{}, {}, {}, {"age": CELL}, {"age": ""}, {"ward": WORD}]
    rules = ["", "", "", 'tell = "details"\n', "min-samples = 20\n", ""]
    # each site has notes of its own
    del cluster.environment["COROLLA_SITE_DIR"]
    cluster.start_superlink()
    for client_id, key in enumerate(make(tmp_path / "keys", len(changed))):
        path = table(data, client_id, **changed[client_id])
        rule = f'site-dir = "{tmp_path}/notes-{client_id}"\n{rules[client_id]}'
        cluster.start_site(client_id, len(changed), rule, data_path=str(path), private_keys=str(key))
    cluster.wait_for_nodes()

    plain = BackgroundRun(cluster, tmp_path / "plain", len(changed), CONFIG)
    plain.finish()
    (record,) = rounds(plain.folder)
    assert sorted(record["clients"]) == ["0", "1", "2"]
    causes = {entry["who"]: entry["cause"] for entry in record["left-out"]}
    assert CELL in causes["client 3"] and "(dataset: " in causes["client 5"] and "(min-samples)" in causes["client 4"]
    server = kept(plain.folder, tmp_path / "plain.log", cluster.home / "superlink.log")
    assert CELL.encode() in server
    for word in (WORD, "column ward", "must have a number", str(data / "patients-4"), str(data / "patients-5")):
        assert word.encode() not in server, word
    assert "column age must hold numbers" in cluster.log("site-3") and WORD in cluster.log("site-5")
    site = audit.entries(cluster.home.parent / "nodes" / "sites" / "site-4")[-1]
    assert "column age must have" in site["why"]

    for name, promise in PROMISES.items():
        run = BackgroundRun(cluster, tmp_path / name, len(changed), CONFIG | promise)
        run.finish()
        (record,) = rounds(run.folder)
        # no value decides whether a site takes part
        assert sorted(record["clients"]) == [str(k) for k in range(len(changed))] and "left-out" not in record
        server = kept(run.folder, tmp_path / f"{name}.log")
        for word in (CELL, WORD, "patients-", "column age", "column ward", "row 17"):
            assert word.encode() not in server, (name, word)
        told = json.dumps([json.loads((run.folder / "clients.json").read_text()), record["clients"]])
        assert not {"class-counts", "dp-noise", "dp-epsilon-replace"} & set(told.split('"'))
        assert all(entry.get("train-samples", 1) == 1 for entry in record["clients"].values())
        assert CELL in cluster.log("site-3")
