"""What a repository keeps of runs: without the machine's paths, and read by compare and report as the runs themselves are."""

from __future__ import annotations

import json
import lzma
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from corolla import load
from corolla.experiments import compare, grouping, significance, sweep
from corolla.experiments import runs as folders
from corolla.experiments.collect import collect, packed, rounded
from corolla.experiments.result_table import text_table
from corolla.experiments.runs import RecordedRun, find
from corolla.report import arrays
from fl_app.config import parse
from fl_app.errors import UserError
from fl_app.server import run_folder
from fl_app.server.run_folder import CONFIG, read_config, read_file, read_metrics
from fl_app.toml import flatten, parse_toml, to_toml
from strategies import METHOD_PARAMS
from tests.conftest import Command, Made, Run
from tests.facts import mentions, rejected


@pytest.fixture
def runs(made_once: Made, tmp_path: Path) -> Path:
    """Write three finished runs' folders: FedOBP with two seeds, FedAvg."""
    for name, keys in (("a", {}), ("b", {"seed": 1}), ("c", {"method": "fedavg"})):
        own = {"run_name": name, "method": "fedobp", "evaluate_every": 1, "finetune_epochs": 1, **keys}
        made_once(tmp_path / "runs" / name, **own)
    return tmp_path / "runs"


def test_collected_runs_compare_as_the_runs_do(runs: Path, tmp_path: Path) -> None:
    kept = collect(find([runs]), tmp_path / "kept")
    assert kept == [tmp_path / "kept" / name for name in "abc"]
    assert {p.name for p in kept[0].iterdir()} == {"summary.json", "run.tar.xz"}
    found = []
    for where in (runs, tmp_path / "kept"):
        groups = compare.group(compare.load([where], METHOD_PARAMS)[0])
        rows = compare.result_rows(groups)
        found.append((text_table(rows), significance.differences_table(groups), [row.means for row in rows]))
    assert found[0] == found[1] and len(found[0][0]) == 3
    for before, after in zip(arrays.read_runs([runs]), arrays.read_runs(kept), strict=True):
        assert before.headline == after.headline and list(before.rounds) == list(after.rounds)
        assert before.figures == after.figures and before.classes == after.classes
        for name in ("before", "after", "evaluation"):
            curves = [arrays.curve([one], name) for one in (before, after)]
            assert curves[0] is not None and curves[1] is not None
            assert curves[1]["mean"].tolist() == pytest.approx(curves[0]["mean"].tolist(), abs=1e-6)
        assert arrays.server_seconds(after) == pytest.approx(arrays.server_seconds(before), abs=2e-3)
        spent = [arrays.until(run)[["bytes", "mean"]].to_dict() for run in (before, after)]
        assert spent[0] == spent[1]


def test_why_a_metric_is_missing_is_kept() -> None:
    record = {"round": 1, "clients": {}, "evaluation": {"clients": {"0": {"accuracy": 0.5}, "1": {}}}}
    record["evaluation"]["clients"]["1"] |= {"metric-errors": "auc: no scores", "accuracy": 1 / 3}
    kept = rounded(record, ["accuracy"])["evaluation"]["clients"]
    assert kept == {"0": {"accuracy": 0.5}, "1": {"accuracy": 0.333333, "metric-errors": "auc: no scores"}}


def test_no_path_of_the_machine_is_kept_and_the_bytes_are_always_the_same(runs: Path, tmp_path: Path) -> None:
    config = runs / "a" / "config.toml"
    config.write_text(config.read_text().replace('dataset = "digits"', f'dataset = "folder:{tmp_path}/images"'))
    summary = json.loads((runs / "a" / "summary.json").read_text())
    (runs / "a" / "summary.json").write_text(json.dumps({**summary, "dataset": f"folder:{tmp_path}/images"}))
    collect(find([runs]), tmp_path / "one")
    collect(find([runs]), tmp_path / "two")
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").glob("*/*"))
    assert len(files) == 6
    for file in files:
        content = (tmp_path / "one" / file).read_bytes()
        assert content == (tmp_path / "two" / file).read_bytes()
        text = lzma.decompress(content) if file.suffix == ".xz" else content
        # what stays are hashes of the data and of what does not train, none of a client's model
        kept = re.sub(rb'"frozen-sha256"|"data": {[^}]*}', b"", text)
        assert str(tmp_path).encode() not in text and b"sha256" not in kept, file
    assert RecordedRun(tmp_path / "one" / "a").settings["dataset"] == "folder:images"
    assert RecordedRun(tmp_path / "one" / "a").summary["dataset"] == "folder:images"


def test_a_collected_run_is_replaced_by_itself_alone(runs: Path, tmp_path: Path) -> None:
    collect(find([runs]), tmp_path / "kept")
    collect(find([runs / "a"]), tmp_path / "kept")
    (runs / "b" / "run.json").replace(runs / "a" / "run.json")
    with rejected(UserError, "", f"{tmp_path}/kept/a exists", f"another run than {runs}/a"):
        collect(find([runs / "a"]), tmp_path / "kept")


def test_a_run_is_not_collected_into_itself(runs: Path, tmp_path: Path, command: Command) -> None:
    before = {p: p.read_bytes() for p in (runs / "a").rglob("*") if p.is_file()}
    (tmp_path / "same").symlink_to(runs)
    for where in (runs, tmp_path / "same"):
        code, out, err = command("runs", runs, "--collect", where)
        assert code == 2 and mentions(err, f"{where}/a", "run itself", "copy would replace"), out
    assert {p: p.read_bytes() for p in (runs / "a").rglob("*") if p.is_file()} == before


def test_a_run_that_was_not_collected_is_not_replaced(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "a", tmp_path / "kept" / "a")
    with rejected(UserError, "--collect", "kept/a", "not collected", "copy would replace"):
        collect(find([runs / "a"]), tmp_path / "kept")


def test_of_the_config_the_keys_of_the_runs_own_method_are_kept(runs: Path, tmp_path: Path) -> None:
    for folder in collect(find([runs]), tmp_path / "kept"):
        run, before = (RecordedRun(path, METHOD_PARAMS) for path in (folder, runs / folder.name))
        tables = {key.partition(".")[0] for key in run.settings if "." in key}
        assert tables == {run.settings["method"]}
        assert run.config.params == before.config.params
        assert grouping.settings(run.settings) == grouping.settings(before.settings)


def test_collected_runs_are_found_wherever_runs_are(runs: Path, tmp_path: Path) -> None:
    kept = collect(find([runs]), tmp_path / "all" / "kept")
    assert [run.path for run in folders.below(tmp_path / "all")] == kept
    assert [run.path for run in folders.below(kept[0])] == kept[:1]
    assert [run.path for run in folders.inside(tmp_path / "all" / "kept")] == kept
    ids = folders.by_experiment(tmp_path / "all")
    assert ids.keys() == folders.by_experiment(runs).keys() and [ids[i].path for i in ids] == kept
    (_, *before), (_, *after) = folders.listing(find([runs])), folders.listing(find(kept))
    assert [row[1:-1] for row in after] == [row[1:-1] for row in before]


def test_a_collected_run_loads(runs: Path, tmp_path: Path) -> None:
    (kept,) = collect(find([runs / "a"]), tmp_path / "kept")
    run, before = load(kept), load(runs / "a")
    assert run.state == "finished" and run.summary == before.summary
    assert list(run.metrics["accuracy-before"]) == list(before.metrics["accuracy-before"])
    assert run.config["fedobp.quantile"] == before.config["fedobp.quantile"]


def test_a_packed_file_is_read_as_far_as_it_goes(runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (kept,) = collect(find([runs / "a"]), tmp_path / "kept")
    archive = kept / "run.tar.xz"
    assert list(RecordedRun(kept).rounds) == [1, 2]
    files = {name: read_file(kept, name).decode() for name in ("config.toml", "run.json", "metrics.jsonl")}
    first = json.loads(files["metrics.jsonl"].splitlines()[0])
    files["metrics.jsonl"] = "".join(json.dumps(first | {"round": t, "loss": t**0.5}) + "\n" for t in range(1, 400))
    archive.write_bytes(whole := packed(files))
    assert list(RecordedRun(kept).rounds) == list(range(1, 400)) and not caplog.records
    archive.write_bytes(whole[: len(whole) * 3 // 4])
    cut = RecordedRun(kept)
    assert cut.settings and cut.about and 0 < len(cut.rounds) < 399
    assert list(cut.rounds) == list(range(1, len(cut.rounds) + 1))
    assert mentions(caplog.text, "metrics.jsonl cannot be", "read")
    archive.write_bytes(b"nothing packed")
    assert RecordedRun(kept).rounds == {} and RecordedRun(kept).about == {}
    with rejected(UserError, "", "run folder", "config.toml in", "a is damaged"):
        find([kept])
    archive.write_bytes(packed({"run.json": files["run.json"]}))
    with rejected(UserError, "", "run folder", "config.toml", "No such file"):
        find([kept])


def test_a_run_too_large_to_be_read_again_is_not_collected(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "MOST_UNPACKED", 2000)
    with rejected(UserError, "--collect", "runs/a has", "bytes", "copy of more", "2,000 is not read"):
        collect(find([runs]), tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_the_command(runs: Path, tmp_path: Path, command: Command) -> None:
    (runs / "b" / "summary.json").unlink()
    code, out, _ = command("runs", runs, "--collect", tmp_path / "kept")
    assert code == 0 and out.splitlines()[-2:] == [str(tmp_path / "kept" / name) for name in "ac"]
    assert {p.name for p in (tmp_path / "kept").iterdir()} == {"a", "c"}


def test_holes_of_a_sparse_file_are_not_unpacked(tmp_path: Path) -> None:
    """They are not in the archive's bytes: a member of 272 bytes may have any size."""
    head = tarfile.TarInfo(run_folder.CONFIG)
    head.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(10**12)}
    head.pax_headers["GNU.sparse.name"] = run_folder.CONFIG
    content = b"1\n999999999999\n1\n".ljust(512, b"\0") + b"x".ljust(512, b"\0")
    head.size = 513
    archive = head.tobuf(tarfile.PAX_FORMAT) + content + bytes(1024)
    (tmp_path / run_folder.PACKED).write_bytes(lzma.compress(archive))
    with tarfile.open(tmp_path / run_folder.PACKED) as members:
        assert members.getmember(run_folder.CONFIG).size == 10**12
    with rejected(ValueError, "", "config.toml", "plain file", "run.tar.xz"):
        run_folder.read_file(tmp_path, run_folder.CONFIG)


def test_tables_nested_too_deeply_are_damage(runs: Path, command: Command) -> None:
    for name in ("run.json", "summary.json", "clients.json", "metrics.jsonl"):
        (runs / "a" / name).write_text("[" * 10**5 + "\n")
        code, out, err = command("runs", runs)
        assert code == 0 and str(runs / "b") in out and str(runs / "c") in out, (name, out, err)


@pytest.mark.parametrize("kind", ["size", "header"])
def test_what_unpacks_to_too_much_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A downloaded run's archive of 300 KB may unpack to gigabytes."""
    monkeypatch.setattr(run_folder, "MOST_UNPACKED", 10**6)
    member, content = tarfile.TarInfo(run_folder.CONFIG), bytes(3 * 10**6)
    member.size = len(content)
    member.type = tarfile.XHDTYPE if kind == "header" else tarfile.REGTYPE
    (tmp_path / run_folder.PACKED).write_bytes(lzma.compress(member.tobuf(tarfile.USTAR_FORMAT) + content))
    with rejected(ValueError, "", "unpack", "most 0.001 GB", "got more"):
        run_folder.read_file(tmp_path, run_folder.CONFIG)
    with rejected(UserError, "", "run folder", "unpack", "most 0.001 GB", "got more"):
        run_folder.read_config(tmp_path)


# What a run folder's config.toml holds, and that folders of earlier versions, which hold more, are the same runs ------


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
