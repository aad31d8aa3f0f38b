"""A full disk under the run folder is one line; with room again the run goes on and ends with the same digest."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from fl_app.errors import UserError
from fl_app.server import checkpoint
from fl_app.server.run_folder import read_summary
from tests.conftest import Run
from tests.disks import full_disk
from tests.facts import rejected

SETTINGS = {"num_server_rounds": 3, "checkpoint_every": 1, "collect_personal_models": True}


# nothing, the config, no checkpoint, one, the last models
@pytest.mark.parametrize("kib", [4, 16, 60, 200, 400])
def test_a_run_on_a_full_disk_ends_in_one_line_and_goes_on(run: Run, tmp_path: Path, kib: int) -> None:
    with full_disk(tmp_path, free=kib * 1024) as there:
        full = f"cannot (write under|create) {there}/run: No space left on device"
        words = f"^output-dir: ({full}|{there}/run: .* are free, and a checkpoint takes about)"
        with pytest.raises(UserError, match=words) as error:
            run(output_dir=str(there), **SETTINGS)
        assert "\n" not in str(error.value)
        if not checkpoint.rounds(there / "run"):
            return
        subprocess.run(["mount", "-o", "remount,size=8m", str(there)], check=True)
        resumed = run(resume=str(there / "run"), **SETTINGS)
        assert read_summary(resumed.path)["digest"] == read_summary(run(**SETTINGS).path)["digest"]


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    with full_disk(tmp_path, free=300_000) as there:
        checkpoint.save(there, 1, {"w": np.zeros(30_000, np.float32)}, {"record": {}})
        with rejected(UserError, "output-dir", "No space left"):
            checkpoint.save(there, 2, {"w": np.zeros(60_000, np.float32)}, {"record": {}})
        assert checkpoint.load_latest(there).meta["round"] == 1
        assert [path.name for path in (there / "checkpoints").glob(".*")] == []
