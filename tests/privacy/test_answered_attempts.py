"""No key of a run's configuration lets a client answer an attempt again: the server chooses all of them, and any values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from client_app.client import CorollaClient
from client_app.client_app import client_of
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import KeySpec, specs
from fl_app.transport.wire import PRIVATE_KEYS
from tests.conftest import flat
from tests.privacy.keys import make

N = 3


def other_values(spec: KeySpec, tmp_path: Path) -> list[Any]:
    """Values that a key may have beside its default: its words, other numbers, other texts, a directory."""
    if isinstance(spec.default, bool):
        return [not spec.default]
    if isinstance(spec.default, int | float):
        return [type(spec.default)(spec.default + more) for more in (1, 7, 0.25, -0.25, -1)]
    return [word for word in spec.choices if word != spec.default] or ["x", "a,b", str(tmp_path / "elsewhere")]


def claims(raw: dict[str, Any], key: Path) -> str | None:
    """Why a site's client refuses to answer an attempt, "" if it answers. None: no run has this configuration."""
    node = {"partition-id": 0, "num-partitions": N, PRIVATE_KEYS: str(key)}
    client = client_of(Context(1, 1, node, RecordDict(), raw))
    if not isinstance(client, CorollaClient) or not client.config.private:
        return None
    try:
        client._site_keys.claim("abc", 1, 0, range(N))
    except UserError as error:
        return str(error)
    return ""


def test_no_key_resets_an_answered_attempt(raw_config: dict[str, Any], tmp_path: Path) -> None:
    key = make(tmp_path / "keys", N)[0]
    raw = {**flat(raw_config), "method": "fedavg", "private": True}
    assert claims(raw, key) == "" and "answered before" in str(claims(raw, key))
    every, tried = specs(RunConfig), set()
    for spec in every:
        for value in other_values(spec, tmp_path):
            if (why := claims({**raw, spec.name: value}, key)) is not None:
                assert why, (spec.name, value)
                tried.add(spec.name)
    assert len(tried) > 0.8 * len(every), {spec.name for spec in every} - tried
