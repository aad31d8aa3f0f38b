"""What programs read: `--json`, `--latex`, `--quiet`, `--log-file`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from corolla.experiments.latex import escaped, tabular
from strategies import METHOD_PARAMS
from tests.conftest import Command, Made
from tests.facts import mentions
from tests.report.conftest import undrawn as undrawn

RUN = ["run", "--in-process", "--clients", "2"]
SETS = ["num-server-rounds=1", "local-epochs=1", "train-samples=20"]
ONE_ROUND = {"num_clients": 2, "num_server_rounds": 1, "train_samples": 20}


def sets(*pairs: str) -> list[str]:
    return [word for pair in (*SETS, *pairs) for word in ("--set", pair)]


@pytest.fixture
def two(corolla: Command, made_once: Made, tmp_path: Path) -> Command:
    """Two runs of one seed, runs/a and runs/b."""
    for name, method in (("a", "fedavg"), ("b", "local")):
        made_once(tmp_path / "runs" / name, method=method, run_name=name, **ONE_ROUND)
    return corolla


def test_json_is_all_that_is_printed(two: Command) -> None:
    code, out, _ = two("runs", "--json")
    runs = json.loads(out)
    assert code == 0 and [run["name"] for run in runs] == ["a", "b"]
    summary = json.loads(two("summary", "a", "--json")[1])
    assert summary["run"] == "runs/a" and summary == {
        "run": "runs/a",
        **json.loads(Path("runs/a/summary.json").read_text()),
        "undefined": {},
    }
    first = runs[0]
    assert (first["state"], first["rounds"], first["planned-rounds"], first["method"]) == ("finished", 1, 1, "fedavg")
    assert first["metric"] == "accuracy" and first["value"] == summary["final-accuracy"]

    compared = json.loads(two("compare", "a", "b", "--json", "--to", "1")[1])
    assert [row["method"] for row in compared["rows"]] == ["fedavg", "local"]
    assert compared["rows"][0]["final-accuracy"] == summary["final-accuracy"]
    assert compared["rows"][0]["final-accuracy-std"] is None and compared["rows"][0]["runs"] == ["runs/a"]
    assert compared["rows"][0]["reached"] == [None] and compared["unfinished"] == []

    code, out, _ = two("data", "show", "--json", "--clients", "2", *sets())
    shown = json.loads(out)
    assert code == 0 and shown["dataset"] == "digits" and len(shown["clients"]) == 2
    client = shown["clients"][0]
    assert sum(client["train-classes"].values()) == client["train"] == 20
    assert json.loads(two("runs", "nowhere", "--json")[1]) == []


def test_a_run_that_is_not_finished_has_no_summary(two: Command) -> None:
    Path("runs/a/summary.json").unlink()
    Path("runs/b/config.toml").write_text("half a [")
    code, out, err = two("summary", "a", "--json")
    assert code == 2 and out == "" and mentions(err, "run did not", "finish")
    states = {run["name"]: run["state"] for run in json.loads(two("runs", "--json")[1])}
    assert states == {"a": "interrupted", "b": "unreadable"}


def test_a_summary_is_shown_by_name(two: Command) -> None:
    code, out, _ = two("summary", "a")
    assert code == 0 and re.search(r"^final-accuracy +0\.\d+$", out, re.MULTILINE)


@pytest.mark.usefixtures("undrawn")
def test_tables_for_papers(two: Command, tmp_path: Path) -> None:
    code, out, _ = two("compare", "a", "b", "--latex")
    assert code == 0 and out.count(r"\begin{tabular}") == out.count(r"\bottomrule") == 3
    code, _, err = two("report", "a", "b", "--latex")
    assert code == 2 and mentions(err, "--latex", "needs --tables DIR")
    code, _, err = two("report", "a", "b", "--output", "page.html")
    assert code == 2 and "directory" in err and "'page.html'" in err and not Path("page.html").exists()
    code, _, err = two("report", "a", "b", "--tables", "t", "--latex")
    text = Path("t/results.tex").read_text()
    assert code == 0 and r"\toprule" in text and "FedAvg" in text, err
    code, _, err = two("compare", "a", "b", "--latex", "--json")
    assert code == 2 and mentions(err, "--json and --latex", "each other")


def test_latex_takes_no_letter_for_a_command() -> None:
    assert mentions(
        escaped("50 % of a_b & {c} #1 ~ ^ $x$ \\n"), "50 \\% of a\\_b", "\\#1", "\\$x\\$ \\textbackslash{}n"
    )
    table = tabular([["method", "n", "final"], ["my_method", "3", "86.82 ± 1.18"], ["b", "3", "n/a"]], "per cent\nmean")
    assert table.splitlines() == [
        r"% needs \usepackage{booktabs}",
        "% per cent",
        "% mean",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"method & n & final \\",
        r"\midrule",
        r"my\_method & 3 & 86.82 $\pm$ 1.18 \\",
        r"b & 3 & n/a \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_what_a_report_writes_is_its_owners_alone(two: Command) -> None:
    code, _, err = two(
        "report", "a", "--output", "page", "--figures", "figures", "--tables", "tables", "--latex", "--quiet"
    )
    assert code == 0, err
    written = [path for place in ("page", "figures", "tables") for path in (Path(place), *Path(place).rglob("*"))]
    assert len(written) > 10
    assert {path.stat().st_mode & 0o777 for path in written if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in written if path.is_file()} == {0o600}


def test_export_and_verify_are_quiet_if_asked(two: Command) -> None:
    code, out, err = two("export", "a", "--output", "a.pt", "--quiet")
    assert (code, out) == (0, "") and Path("a.pt").is_file(), err
    assert two("verify", "a.pt", "--quiet")[:2] == (0, "")
    Path("a.pt").write_bytes(Path("a.pt").read_bytes()[:-1] + b"x")
    code, out, err = two("verify", "a.pt", "--quiet")
    assert code == 2 and out == "" and mentions(err, "changed since", "exported")


def test_lists_are_json_if_asked(corolla: Command) -> None:
    presets = json.loads(corolla("presets", "fedcac/*", "--json")[1])
    assert set(presets[0]) == {"preset", "published", "paper", "source", "table", "column"}
    assert presets[0]["preset"].startswith("fedcac/")
    methods = json.loads(corolla("methods", "--json")[1])
    assert [row["method"] for row in methods] == list(METHOD_PARAMS)
    (fedcac,) = json.loads(corolla("methods", "fedcac", "--json")[1])
    tau = next(row for row in fedcac["parameters"] if row["key"] == "fedcac.tau")
    assert tau["default"] == 0.5 and "0" in tau["range"] and tau["meaning"]
    code, out, err = corolla("methods", "--json", "--table")
    assert code == 2 and out == "" and mentions(err, "--json and --table", "each other")


def test_client_state_is_json_if_asked(corolla: Command) -> None:
    assert json.loads(corolla("state", "list", "--json")[1])["experiments"] == []
    code, _, err = corolla(*RUN, *sets("method=fedper", "run-name=p", "keep-state=true", 'state-dir="kept"'))
    assert code == 0, err
    (left,) = json.loads(corolla("state", "list", "--state-dir", "kept", "--json")[1])["experiments"]
    assert left["clients"] == 2 and left["bytes"] > 0 and left["run"] == "runs/p" and left["modified"] > 1e9
    assert corolla("state", "remove", left["experiment"], "--state-dir", "kept", "--quiet")[:2] == (0, "")


def test_an_exported_model_answers_in_json(two: Command) -> None:
    assert two("export", "a", "--output", "a.pt", "--quiet")[0] == 0
    card = json.loads(two("verify", "a.pt", "--json")[1])
    assert card["file"] == "a.pt" and card["run"]["name"] == "a" and len(card["sha256"]) == 64
    np.savez("rows.npz", x=np.zeros((2, 8, 8), np.uint8), y=np.array([0, 1]))
    code, out, err = two("predict", "a.pt", "rows.npz", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert len(found["predictions"]) == 2 and 0 < found["predictions"][0]["probability"] <= 1
    assert found["measured"] == {"metric": "accuracy", "value": found["measured"]["value"], "samples": 2}


def test_clusters_keys_are_made_quietly(corolla: Command) -> None:
    Path("lab.yaml").write_text("superlink: {fleet-address: server.example.org}\nhosts: [{host: local}]\n")
    assert corolla("cluster", "keys", "lab.yaml", "--quiet")[:2] == (0, "")
    assert "0 files written" in corolla("cluster", "keys", "lab.yaml")[1]


def test_prepared_data_are_verified_quietly(two: Command, data_dir: Path) -> None:
    kept = ("--set", f"data-dir={data_dir}")
    assert two("data", "verify", *kept, "--quiet")[:2] == (0, "")
    assert "are sound" in two("data", "verify", *kept)[1]


def test_quiet_leaves_warnings_and_errors(corolla: Command) -> None:
    words = sets("method=fedavg", "fedcac.beta=3", "run-name=q")
    code, out, err = corolla(*RUN, "--quiet", *words)
    assert code == 0 and out == "" and mentions(err, "fedcac.beta has no", "effect")
    code, out, err = corolla(*RUN, "--quiet", *words)
    assert code == 2 and out == "" and "exists already" in err
    # it does not outlast its command
    assert "runs/q" in corolla("runs")[1]


def test_the_log_file_has_what_is_said_and_when(corolla: Command) -> None:
    words = sets("method=fedavg", "run-name=q", "fedcac.beta=3")
    code, shown, err = corolla(*RUN, "--quiet", "--log-file", "logs/run.log", *words)
    assert code == 0 and shown == "", err
    log = Path("logs/run.log")
    text = log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in text.splitlines())
    for words_of_it in (
        "round 1/1: accuracy",
        "warning: fedcac.beta has no effect",
        "fedavg",
        "next: corolla report",
    ):
        assert words_of_it in text
    corolla("runs")
    assert log.read_text() == text
    code, _, err = corolla(*RUN, "--log-file", "logs", *sets("run-name=r"))
    assert (
        code == 2 and mentions(err, "--log-file", "cannot write logs", "Is a directory") and not Path("runs/r").exists()
    )


def test_errors_are_logged_too(corolla: Command) -> None:
    assert corolla(*RUN, "--log-file", "run.log", "--set", "sede=1")[0] == 2
    assert "error: invalid configuration:" in Path("run.log").read_text()


def test_a_connection_that_is_not_there_is_named(corolla: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("flwr").mkdir()
    monkeypatch.setenv("FLWR_HOME", str(Path("flwr").resolve()))
    Path("flwr/config.toml").write_text('[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "127.0.0.1:1"\n')
    code, out, err = corolla("run", "--superlink", "labb", "--clients", "2")
    assert code == 2 and mentions(err, "no connection", "it has lab", "did you mean")
    assert "--superlink labb: " in err and out == ""


def test_a_sweep_that_comes_with_corolla(corolla: Command) -> None:
    code, out, _ = corolla("sweep", "digits", "--dry-run")
    assert code == 0 and out
    for name in ("sweeps/digits.toml", "digits.toml"):
        code, _, err = corolla("sweep", name, "--dry-run")
        assert code == 2 and mentions(err, name, "no such file", "directory", "`corolla sweep digits`", "runs")
    code, _, err = corolla("sweep", "digts", "--dry-run")
    assert code == 2 and mentions(err, "did you mean", "digits?")
