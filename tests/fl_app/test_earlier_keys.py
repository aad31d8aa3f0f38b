"""Earlier names of keys and values mean the current ones wherever a config is read, for one release."""

from __future__ import annotations

from pathlib import Path

import pytest

from corolla.api.starting import flat
from corolla.cli.options import parse_set
from corolla.experiments.sweep import read_sweep
from corolla.presets import read_preset
from deploy.site import read_site, refusal
from fl_app.config import earlier_keys, parse, parse_recorded
from fl_app.errors import UserError
from fl_app.server.run_folder import CONFIG, read_config
from fl_app.toml import to_toml
from strategies import METHOD_PARAMS
from tests.conftest import Run
from tests.facts import mentions

BEFORE = {"robust-liars": 0.2, "private-absent": "alone"}
NOW = {"byzantine-ratio": 0.2, "private-left-out": "client"}


def test_a_config_with_earlier_names_is_the_same_run() -> None:
    given = {"method": "fedavg", "num-clients": 5}
    for read in (parse, parse_recorded):
        assert read({**given, **BEFORE}, METHOD_PARAMS) == read({**given, **NOW}, METHOD_PARAMS)
    with pytest.raises(UserError, match="robust-liars: unknown key"):
        parse({**given, "robust-liars": 0.2, "byzantine-ratio": 0.3}, METHOD_PARAMS)


def test_all_places_that_take_keys_take_earlier_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    earlier_keys._warn.cache_clear()
    assert parse_set(["discover=drawn"]) == {"discover": "sampled"}
    assert parse_set(["robust-liars=0.2", "private-absent=alone"]) == NOW
    assert [record.getMessage() for record in caplog.records] == [
        f"{name}: the earlier name of the key {now}, valid for one release" for name, now in earlier_keys.KEYS.items()
    ]
    assert flat({"robust_liars": 0.2, "private_absent": "alone"}) == NOW
    path = tmp_path / "given.toml"
    path.write_text(to_toml({"extends": "base.toml", "robust-liars": 0.2}))
    (tmp_path / "base.toml").write_text(to_toml({"byzantine-ratio": 0.1, "private-absent": "alone"}))
    assert read_preset(str(path)) == NOW
    path.write_text('[settings]\nrobust-liars = 0.2\n[grid]\nprivate-absent = ["alone", "company"]\n')
    sweep = read_sweep(path)
    assert sweep.settings == {"byzantine-ratio": 0.2} and sweep.grids == [{"private-left-out": ["client", "group"]}]


def test_a_run_folder_with_earlier_names_is_the_same_run(run: Run) -> None:
    folder = run().path
    saved = read_config(folder)
    before = {"robust-liars": saved.pop("byzantine-ratio"), "private-absent": "company"}
    assert saved.pop("private-left-out") == "group"
    (folder / CONFIG).write_text(to_toml({**saved, **before}))
    assert read_config(folder) == {**saved, "byzantine-ratio": 0.3, "private-left-out": "group"}


@pytest.mark.parametrize("key", ["private-absent", "private-left-out"])
@pytest.mark.parametrize(
    "bound", ["private-absent = {one-of = ['company']}", "private-left-out = {one-of = ['group']}"]
)
def test_a_sites_bound_holds_under_both_names(key: str, bound: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(f"[bounds]\n{bound}\n")
    path.chmod(0o600)
    site, (before, now) = read_site(path), (("alone", "company"), ("client", "group"))
    allowed, refused = (before if key == "private-absent" else now)[::-1]
    assert refusal(site, "", {"method": "fedavg", key: allowed}) == ""
    assert mentions(refusal(site, "", {"method": "fedavg", key: refused}), "private-left-out", "group", "got client")
