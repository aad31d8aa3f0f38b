"""A certificate that ends during a run: the run ends with its name, and no client is blamed for it."""

from __future__ import annotations

import pytest

from deploy import certificates, inventory
from tests.e2e.conftest import BackgroundRun, Lab, rounds, wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

# enough to bring the cluster up and to finish a round on a busy machine
LASTS = 240
CONFIG = {
    "method": "fedavg",
    "num-server-rounds": 100_000,
    "train-samples": 40,
    "test-samples": 20,
    "local-epochs": 1,
    "available-timeout": 300.0,
}


def test_a_certificate_that_ends_in_a_run_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.write(tls=True, hosts=[{"host": "local", "supernodes": 2, "warm": True}])
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_SERVER_DAYS", LASTS / 86400)
        certificates.make(inventory.read_inventory(lab.inventory))
    up = lab.cluster("up", "--timeout", "120")
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        assert "server.crt expires on" in up.stdout and "minutes; `corolla cluster keys --renew" in up.stdout
        status = lab.cluster("status")
        assert "server.crt expires on" in status.stderr, status.stderr
        run = BackgroundRun(lab, lab.directory / "r", 2, CONFIG, superlink="lab")
        assert run.process.wait(600) == 1
        said = " ".join(run.log.split())
        assert "certificate has expired" in said and "keys --renew" in said and "--resume" in said, run.log
        done = rounds(run.folder)
        assert done and all(r["failures"] == [] and sorted(r["clients"]) == ["0", "1"] for r in done)
        log = lab.directory / "state" / "clusters" / "lab" / "superlink.log"
        for line in ("server.crt expires on", "server.crt expired on"):
            assert wait_for(lambda line=line: line in log.read_text(errors="replace"), 60), line
    finally:
        lab.cluster("down")
