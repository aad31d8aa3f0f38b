"""The kinds of errors that a caller can catch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import corolla


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"method": "fedx"}, "ConfigurationError"),
        ({"momentum": 2.0}, "ConfigurationError"),
        ({"model": "no_such_file:Net"}, "ConfigurationError"),
        ({"dataset": "table:none.csv", "target": "y"}, "DataError"),
        ({"partition": "dirichlet", "num_clients": 2000}, "DataError"),
        ({"method": "fedproto", "task": "regression"}, "MethodError"),
        ({"superlink": "nowhere"}, "DeploymentError"),
    ],
)
def test_each_kind_is_raised_before_anything_is_written(
    keys: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    with pytest.raises(corolla.UserError) as refused:
        corolla.run(progress=False, **({} if "superlink" in keys else {"in_process": True}), **keys)
    assert type(refused.value) is getattr(corolla, kind), refused.value
    assert not (tmp_path / "runs").exists()


def test_an_error_is_whole_in_another_process() -> None:
    with pytest.raises(corolla.ConfigurationError) as refused:
        corolla.run(num_server_rounds=0, momentum=2.0)
    copy = pickle.loads(pickle.dumps(refused.value))
    assert [(p.key, p.value) for p in copy.problems] == [("num-server-rounds", 0), ("momentum", 2.0)]
    assert (str(copy), copy.key, copy.rule) == (str(refused.value), refused.value.key, refused.value.rule)
