"""What a run folder's config.toml holds, and that folders of earlier versions, which hold more, are the same runs."""

from __future__ import annotations

from pathlib import Path

from corolla.experiments import compare, sweep
from corolla.experiments.collect import collect
from corolla.experiments.runs import find
from fl_app.config import parse
from fl_app.server.run_folder import CONFIG, read_config, read_file, read_metrics
from fl_app.toml import flatten, parse_toml, to_toml
from strategies import METHOD_PARAMS
from tests.conftest import Run


def as_before(folder: Path) -> None:
    """Rewrite a config as earlier versions wrote it: with every method's table, and a key of TensorBoard's own."""
    saved = read_config(folder)
    text = to_toml({**parse(saved, METHOD_PARAMS).resolved, "tensorboard": False})
    assert "[fedcac]" in text and "[fedobp]" in text and "tensorboard = false" in text
    (folder / "config.toml").write_text(text)


def tables(folder: Path) -> set[str]:
    return {
        name.partition(".")[0]
        for name in flatten(parse_toml(read_file(folder, CONFIG), folder / CONFIG))
        if "." in name
    }


def test_a_config_holds_the_keys_of_its_method_alone(run: Run, tmp_path: Path) -> None:
    fedavg, fedcac = run(run_name="a").path, run(run_name="b", method="fedcac").path
    assert (tables(fedavg), tables(fedcac)) == ({"fedavg"}, {"fedcac"})
    as_before(fedcac)
    (kept,) = collect(find([fedcac]), tmp_path / "kept")
    assert tables(kept) == {"fedcac"} and b"tensorboard" not in read_file(kept, CONFIG)


def test_a_config_of_an_earlier_version_is_the_same_run(run: Run, tmp_path: Path) -> None:
    now, before = (run(run_name=name, method="fedcac", seed=seed).path for seed, name in enumerate("ab"))
    as_before(before)
    finished, _ = sweep.scan(tmp_path / "runs", METHOD_PARAMS)
    asked = [parse({**read_config(now), "seed": seed}, METHOD_PARAMS) for seed in (0, 1)]
    assert [finished[sweep.identity(config)].path for config in asked] == [now, before]
    found, unfinished = compare.load([now, before], METHOD_PARAMS)
    assert len(compare.group(found)) == 1 and not unfinished


def test_a_run_of_an_earlier_version_goes_on(run: Run) -> None:
    folder = run(method="fedcac", keep_state=True).path
    as_before(folder)
    run(method="fedcac", keep_state=True, num_server_rounds=3, resume=str(folder))
    assert [record["round"] for record in read_metrics(folder)] == [1, 2, 3]
    assert tables(folder) == {"fedcac"} and "tensorboard" not in read_config(folder)
