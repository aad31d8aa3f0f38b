"""What the command says so that nobody is misled: what figures are of, and what was probably meant."""

from __future__ import annotations

from pathlib import Path

from fl_app.server.run_folder import read_about
from strategies.base import OWN_MODEL
from tests.conftest import Command


def test_a_method_with_a_second_model_says_which_one_is_tested(corolla: Command) -> None:
    sets = ["--set", "num-server-rounds=1", "--set", "local-epochs=1", "--set", "train-samples=20"]
    for method, count in (("ditto", 2), ("fedavg", 0)):  # at the start, and below the table
        code, out, err = corolla("run", "--in-process", *sets, "--set", f"method={method}", "--set", f"run-name={method}")
        assert code == 0, err
        assert " ".join(out.split()).count(f"{method}: {OWN_MODEL}") == count
        assert read_about(Path("runs", method))["tested"] == (OWN_MODEL if count else "")
