"""Every word that leaves a site: answers of the real client to start questions, over data that differ in one cell."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from client_app.client_app import app
from fl_app import reasons
from fl_app.config import RunConfig
from fl_app.data import site_columns
from fl_app.data.site_columns import SiteColumns
from fl_app.keys import KeySpec, Scalar, specs
from fl_app.layout import NOTHING
from fl_app.server.properties import COLUMNS, MODEL_NAMES
from fl_app.transport import outgoing, wire
from fl_app.transport.outgoing import OPEN, TABLE, TELL, Mode
from fl_app.transport.wire import Download, Upload
from tests.conftest import SMALL

CELL = "John Smith 1957-03-02"
PLAIN: dict[str, Scalar] = {}
PRIVATE: dict[str, Scalar] = {"private": True}
DP: dict[str, Scalar] = {"dp-epsilon": 3.0, "dp-delta": 1e-3}
PROMISES = (PRIVATE, DP, PRIVATE | DP)
ROWS = 40
# what an answer tells of a site's data by a hash under the site's own key
KEYED = {"data-sha256"}


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COROLLA_SITE_DIR", str(tmp_path / "site"))
    monkeypatch.delenv(TELL, raising=False)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 0


def run_config(promise: Mapping[str, Scalar], **more: Scalar) -> dict[str, Scalar]:
    given = {name.replace("_", "-"): value for name, value in more.items()}
    return {**SMALL, "dataset": "node", "partition": "iid", "num-server-rounds": 1, **promise, **given}


def answer(
    config: Mapping[str, Scalar],
    path: Path | str,
    kind: str = wire.QUERY,
    content: RecordDict | None = None,
    keys: str = wire.SEED_KEYS,
) -> Message:
    """What a site with this data sends to a message: the real application, as a SuperNode starts it."""
    node = {"partition-id": 0, "num-partitions": 3, "data-path": str(path), wire.PRIVATE_KEYS: keys}
    message = Message(content or wire.encode_query(), 1, kind)
    message.metadata.__dict__["_message_id"] = "0" * 64
    return app(message, Context(1, 1, node, RecordDict(), dict(config)))


def entries(message: Message) -> dict[str, Any]:
    """All entries of an answer that are no arrays."""
    records = message.content.values()
    return {name: value for r in records if not hasattr(r, "to_numpy_ndarrays") for name, value in r.items()}


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> set[str]:
    names = first.keys() | second.keys()
    return {name for name in names if repr(first.get(name)) != repr(second.get(name))}


def of_data(config: Mapping[str, Scalar]) -> set[str]:
    """The entries that may depend on values in the data, in a run with this config."""
    modes = outgoing.modes_of(config)
    return {entry.name for entry in TABLE if entry.of_data and modes <= entry.modes}


def table(path: Path, changed: tuple[int, str, str] | None = None) -> Path:
    """A site's table, in which one cell (row, column, value) is changed."""
    words = ("well", "ill")
    rows = [
        {"name": f"person {k}", "age": str(20.5 + k * k % 17), "ward": "ab"[k % 2], "state": words[k % 2]}
        for k in range(ROWS)
    ]
    if changed:
        row, column, value = changed
        rows[row][column] = value
    path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n")
    return path


cells = st.tuples(
    st.integers(0, ROWS - 1),
    st.sampled_from(["age", "ward", "state"]),
    st.sampled_from(
        [CELL, "", "well", "ill", "a", "b", "c", "33.5", "1e999", "nan", "None", "0", "-1", "true", "2024-02-30"]
    ),
)


@pytest.mark.parametrize("promise", [PLAIN, *PROMISES])
def test_answers_to_tables_that_differ_in_one_cell_differ_in_listed_entries(
    tmp_path: Path, promise: dict[str, Scalar]
) -> None:
    config = run_config(promise, target="state", classes="well,ill", categorical="ward=a|b", exclude="name")
    whole = answer(config, table(tmp_path / "whole.csv"))
    assert wire.ERROR not in entries(whole)
    count = iter(range(10**6))

    @settings(max_examples=25)
    @given(cells)
    def check(changed: tuple[int, str, str]) -> None:
        found = answer(config, table(tmp_path / f"{next(count)}.csv", changed))
        differs = differing(entries(whole), entries(found))
        told = entries(found)
        if wire.ERROR in told:
            # one constant answer, whatever the cell
            assert told == {wire.ERROR: "data/dataset/readable", "client-id": 0, "code": 0, "message": "Success"}
        else:
            assert differs <= of_data(config) | KEYED, changed
        if promise:
            assert differs <= KEYED, changed

    check()


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize(
    "keys",
    [
        {"target": "age", "task": "regression"},
        {"target": "state", "classes": "well,ill", "impute": "age"},
        {"target": "state", "classes": "well,ill", "normalize": "unit"},
        {"target": "state", "classes": "well,ill", "client": "age"},
        {"target": "state", "classes": "well,ill", "validation_ratio": 0.3},
    ],
)
def test_no_key_makes_an_answer_depend_on_a_cell(
    tmp_path: Path, promise: dict[str, Scalar], keys: dict[str, Scalar]
) -> None:
    words = "ward=a|b,state=well|ill" if "task" in keys else "ward=a|b"
    config = run_config(promise, categorical=words, exclude="name", **keys)
    whole = entries(answer(config, table(tmp_path / "whole.csv")))
    assert wire.ERROR not in whole
    for k, cell in enumerate((CELL, "", "1e12", "1e999", "2024-01-01", "20.5")):
        found = entries(answer(config, table(tmp_path / f"{k}.csv", (3, "age", cell))))
        assert differing(whole, found) <= KEYED, cell


@pytest.mark.parametrize(
    "own",
    [
        {"scale": {"age": 0.001}, "fill": {"age": 33.0, "ward": "a", "state": "well", "humidity": 4.0}},
        {"rename": {"age": "years"}, "scale": {"years": 1e308}, "decimal": ","},
        {"fill": {"age": "word"}},
        {"scale": {"missing": 2.0}},
    ],
)
def test_a_sites_own_form_of_its_table_makes_no_answer_depend_on_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    """`[data]` of site.toml: units, names, signs, and values for what is missing."""
    monkeypatch.setenv(site_columns.VARIABLE, SiteColumns.of(own).text)
    config = run_config(PRIVATE | DP, target="state", classes="well,ill", categorical="ward=a|b", exclude="name")
    whole = entries(answer(config, table(tmp_path / "whole.csv")))
    for k, (column, cell) in enumerate(itertools.product(("age", "ward", "state"), (CELL, "", "1e999", "2024-01-01"))):
        found = entries(answer(config, table(tmp_path / f"{k}.csv", (3, column, cell))))
        assert differing(whole, found) <= KEYED, (column, cell)


@pytest.mark.parametrize("promise", PROMISES)
def test_a_column_without_any_number_has_the_same_answer(tmp_path: Path, promise: dict[str, Scalar]) -> None:
    """Each column of words, named as a feature or as the number to learn, has the answer of a column of numbers."""
    for keys in ({"target": "age"}, {"target": "name", "exclude": "age"}):
        config = run_config(promise, task="regression", categorical="ward=a|b,state=well|ill", **keys)
        assert wire.ERROR not in entries(answer(config, table(tmp_path / "site.csv")))


@pytest.mark.parametrize("promise", PROMISES)
def test_numbers_of_arrays_have_one_answer(tmp_path: Path, promise: dict[str, Scalar]) -> None:
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    for keys, dtype in (({"classes": "well,ill"}, np.int64), ({"task": "regression"}, np.float64)):
        found = []
        for k, value in enumerate((0.5, np.nan, np.inf, 1e300)):
            other, y = x.copy(), (np.arange(ROWS) % 2).astype(dtype)
            other[3, 1] = value
            if dtype is np.float64:
                y[5] = value
            path = tmp_path / f"{k}-{np.dtype(dtype).name}.npz"
            np.savez(path, x_train=other, y_train=y, x_test=other, y_test=y)
            found.append(entries(answer(run_config(promise, **keys), path)))
            assert wire.ERROR not in found[-1] and differing(found[0], found[-1]) <= KEYED


@pytest.mark.parametrize("promise", PROMISES)
@settings(max_examples=20)
@given(st.lists(st.sampled_from([f"person {k}" for k in range(ROWS + 20)]), min_size=2, max_size=25, unique=True))
def test_guesses_of_a_column_have_one_answer(
    tmp_path_factory: pytest.TempPathFactory, promise: dict[str, Scalar], guesses: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("guesses")
    config = run_config(promise, target="name", classes=",".join(guesses), categorical="ward=a|b,state=well|ill")
    other = table(directory / "other.csv", (7, "name", "person 50"))
    found = [entries(answer(config, path)) for path in (table(directory / "site.csv"), other)]
    assert wire.ERROR not in found[0] and differing(*found) <= KEYED


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_guesses_of_a_columns_name_have_one_answer(tmp_path: Path, kind: str) -> None:
    """In a private run: a server that asks for columns by their names would learn which ones a site has."""
    config = run_config(PRIVATE, target="state", classes="well,ill", categorical="ward=a|b", exclude="name")
    path, task, found = table(tmp_path / "site.csv"), "evaluate" if kind == "evaluate" else "train", []
    for names in (["age", "ward=b"], ["age"], ["hiv"], []):
        download = Download(task, 1, 0, "words", NOTHING, method={COLUMNS: json.dumps(names)})
        found.append(entries(answer(config, path, kind, wire.encode_download(download))))
    assert found == [found[0]] * 4 and found[0][wire.ERROR] == "protocol/private/hidden"


def named(*features: str) -> RecordDict:
    """A message of a private run, with the names of a first model of which the server says that the run starts from it."""
    names = json.dumps({"features": features, "classes": ["well", "ill"]})
    return wire.encode_download(Download("train", 1, 0, "words", NOTHING, method={MODEL_NAMES: names}))


def test_a_first_model_that_no_run_has_is_no_guess_of_names(tmp_path: Path) -> None:
    """In a private run clients compare such names with their own, so a server could guess them one after the other."""
    config = run_config(PRIVATE, target="state", classes="well,ill", categorical="ward=a|b", exclude="name")
    path = table(tmp_path / "site.csv")
    found = [entries(answer(config, path, "train", named(*names))) for names in (["age", "ward=a", "ward=b"], ["hiv"])]
    assert found == [found[0]] * 2 and found[0][wire.ERROR] == "protocol/private/hidden"
    # one with such a model has one list of names
    config |= {"initial-weights": str(tmp_path / "model.safetensors")}
    found = [
        entries(answer(config, path, "train", named(*names)))
        for names in (["hiv"], ["age", "ward=a", "ward=b"], ["age"], ["hiv"])
    ]
    reasons_given = [each[wire.ERROR] for each in found]
    assert reasons_given[1:3] == ["protocol/private/hidden"] * 2 and reasons_given[0] == reasons_given[3]
    assert reasons_given[0] != reasons_given[1]


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("label", [0, 1, 2, 9, -1, 10**6])
def test_labels_of_arrays_have_one_answer(tmp_path: Path, promise: dict[str, Scalar], label: int) -> None:
    config, found = run_config(promise, classes="well,ill"), []
    for name, last in (("whole", 1), ("other", label)):
        y = np.array([*(k % 2 for k in range(ROWS - 1)), last])
        x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        found.append(entries(answer(config, tmp_path / f"{name}.npz")))
    assert wire.ERROR not in found[0] and differing(*found) <= KEYED


def tried(spec: KeySpec) -> tuple[Scalar, ...]:
    """Values of a key that a submitter may steer answers with."""
    if spec.choices:
        return spec.choices
    by_type: dict[type, tuple[Scalar, ...]] = {bool: (not spec.default,), int: (1, 16), float: (0.0, 0.5)}
    return by_type.get(spec.type, ("age", "name", "age:30", "name=person 1|x"))


@pytest.mark.long
@pytest.mark.parametrize("promise", [PRIVATE, DP])
def test_no_key_of_a_run_makes_an_answer_depend_on_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promise: dict[str, Scalar]
) -> None:
    """Every key of the registry, over two sites that differ in a number, a word, a label, a name and a row more."""
    # keys of directories are tried, too
    monkeypatch.chdir(tmp_path)
    paths = [table(tmp_path / "site.csv"), table(tmp_path / "other.csv", (3, "age", CELL))]
    lines = paths[1].read_text().splitlines()
    lines[8:10] = ["John Smith,33,c,dead", ",,,"]
    paths[1].write_text("\n".join([*lines, "someone,33,a,well"]) + "\n")
    differs = set()
    for spec in specs(RunConfig):
        for value in () if spec.name in ("private", "dp-epsilon") else tried(spec):
            config = run_config(promise, target="state", classes="well,ill", categorical="ward=a|b", exclude="name")
            found = [entries(answer(config | {spec.name: value}, path)) for path in paths]
            if differing(*found) - KEYED:
                differs.add(spec.name)
    # only there a private run tells the server counts, which it bounds (docs/privacy.md)
    assert differs == ({"max-size-weight"} if promise is PRIVATE else set())


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("row", [b"x,1,a,well,more\n", b"\xff,1,a,well\n", b"x\n", b"\n"])
def test_a_row_that_is_broken_has_the_same_answer(tmp_path: Path, promise: dict[str, Scalar], row: bytes) -> None:
    config = run_config(promise, target="state", classes="well,ill", categorical="ward=a|b", exclude="name")
    paths = [table(tmp_path / "site.csv"), table(tmp_path / "broken.csv")]
    paths[1].write_bytes(paths[1].read_bytes() + row)
    found = [entries(answer(config, path)) for path in paths]
    assert wire.ERROR not in found[0] and differing(*found) <= KEYED


@pytest.mark.parametrize("promise", PROMISES)
def test_a_row_more_has_the_same_answer(tmp_path: Path, promise: dict[str, Scalar]) -> None:
    """Counts of rows, what a privacy budget spends, and its noise follow from the number of records."""
    config = run_config(promise, target="state", classes="well,ill", categorical="ward=a|b", exclude="name")
    config |= {"method": "local", "report-accuracy": False, "model": "mlp"}
    paths = [table(tmp_path / "site.csv"), table(tmp_path / "longer.csv")]
    paths[1].write_text(paths[1].read_text() + "person,33,a,well\n")
    asked: list[tuple[str, RecordDict | None, dict[str, Scalar]]] = [(wire.QUERY, None, {})]
    if "dp-epsilon" in promise:
        # without `private`: an upload without a model needs no masks
        asked.append(("train", wire.encode_download(Download("train", 1, 0, "words", NOTHING)), {"private": False}))
    for kind, content, changes in asked:
        changes = {**changes, "method": "fedavg"} if kind == wire.QUERY else changes
        found = [entries(answer(config | changes, path, kind, content)) for path in paths]
        assert wire.ERROR not in found[0]
        assert {name for name in differing(*found) if not name.startswith("seconds-")} <= KEYED


@pytest.mark.parametrize("promise", PROMISES)
def test_an_image_of_another_class_has_the_same_answer(tmp_path: Path, promise: dict[str, Scalar]) -> None:
    config, found = run_config(promise, classes="well,ill"), []
    for last in ("well", "ill", "dead"):
        for k in range(12):
            place = tmp_path / last / "train" / (last if k == 11 else ("well", "ill")[k % 2])
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), 20 * k, np.uint8)).save(place / f"{k:02}.png")
        found.append(entries(answer(config, tmp_path / last)))
    assert wire.ERROR not in found[0]
    assert differing(found[0], found[1]) <= KEYED and differing(found[0], found[2]) <= KEYED


@pytest.mark.parametrize("promise", PROMISES)
def test_classes_must_be_declared(tmp_path: Path, promise: dict[str, Scalar]) -> None:
    config = run_config(promise, dataset=f"table:{table(tmp_path / 'site.csv')}", target="name", exclude="state")
    assert entries(answer(config, ""))[wire.ERROR] == "configuration/classes/declared"


@pytest.mark.parametrize("promise", [PLAIN, *PROMISES])
@pytest.mark.parametrize("tell", ["", "reasons", "details"])
def test_a_bad_cell_is_named_only_where_the_site_tells_and_the_run_promises_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    promise: dict[str, Scalar],
    tell: str,
) -> None:
    monkeypatch.setenv(TELL, tell)
    path = table(tmp_path / "site.csv", (3, "age", CELL))
    words = CELL
    if promise:
        # a cell does not refuse the data there, and a broken file does
        path.write_text(path.read_text() + '"someone,1,a,well')
        words = f"row {ROWS + 1}"
    config = run_config(promise, target="state", classes="well,ill", categorical="ward=a|b", exclude="name")
    for kind in (wire.QUERY, "train", "evaluate"):
        task = "evaluate" if kind == "evaluate" else "train"
        content = None
        if kind != wire.QUERY:
            content = wire.encode_download(Download(task, 1, 0, "words", NOTHING))
        caplog.clear()
        told = entries(answer(config, path, kind, content))
        assert told[wire.ERROR] == "data/dataset/readable"
        assert (words in str(told)) == (tell == "details" and not promise)
        assert words in caplog.text
        assert (words in wire.error_in(told)) == (tell == "details" and not promise)


@pytest.mark.parametrize(
    "changes, expected",
    [
        # a budget's notes are filed by the data, so they open the data first
        (DP | {"dataset": "node"}, "data/dataset/readable"),
        ({"normalize-over": "sites", "categorical": "ward"}, "protocol/normalize-over/"),
    ],
)
def test_what_a_site_raises_while_it_trains_says_its_reason(
    tmp_path: Path, changes: dict[str, Scalar], expected: str
) -> None:
    config = run_config(
        PLAIN, method="local", target="state", classes="well,ill", categorical="ward=a|b", exclude="name"
    )
    path = table(tmp_path / "site.csv")
    if changes.keys() & DP.keys():
        path.write_text(path.read_text() + '"open')
    content = wire.encode_download(Download("train", 1, 0, "words", NOTHING))
    assert entries(answer(config | changes, path, "train", content, keys=""))[wire.ERROR] == expected


@pytest.mark.parametrize("kind", [wire.QUERY, "train", "evaluate", "get_parameters"])
def test_no_exception_leaves_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(CELL)

    monkeypatch.setattr("client_app.client_app.client_of", fail)
    reply = answer(run_config(PLAIN), table(tmp_path / "site.csv"), kind)
    text = reply.error.reason if reply.has_error() else entries(reply)[wire.ERROR]
    assert reasons.read(text) is not None and CELL not in str(reply)


def test_a_state_that_cannot_be_written_or_read_has_a_reason_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(PLAIN, method="local", dataset="digits")

    def asked(version: str = "") -> str:
        content = wire.encode_download(Download("train", 1, 0, "words", NOTHING, version))
        return str(entries(answer(config, "", "train", content))[wire.ERROR])

    assert asked("000007-000000") == "deployment/state-dir/state"
    # a file in its place: root, whom permissions do not stop, cannot write there either
    (tmp_path / "state").write_text("a file")
    assert asked() == "deployment/state-dir/writable" and "Not a directory" in caplog.text


def test_what_is_not_declared_stays(caplog: pytest.LogCaptureFixture) -> None:
    content = wire.encode_upload(Upload(NOTHING, metrics={"rows": 3, "names": CELL, "test-samples": 2}))
    content["fitres.more"] = wire.encode_upload(Upload(NOTHING))["fitres.metrics"]
    caplog.set_level(logging.WARNING, "corolla")
    left = outgoing.leaving("fit", content, outgoing.Way(OPEN))
    assert "rows" not in left["fitres.metrics"] and CELL not in str(dict(left)) and "fitres.more" not in left
    assert left["fitres.metrics"]["test-samples"] == 2 and "names, rows" in caplog.text


NEW = """
from fl_app import metrics
metrics.OF_EVERY_METHOD += (metrics.Metric("battery", low=0{promised}),)
from client_app.client_app import client_of
from fl_app.transport import outgoing
from tests.privacy.test_words import PLAIN, PRIVATE, DP, Context, RecordDict, run_config
node = {{"partition-id": 0, "num-partitions": 3, "data-path": ""}}
for promise in (PLAIN, PRIVATE, DP, PRIVATE | DP):
    config = run_config(promise, dataset="digits", classes="")
    way = client_of(Context(1, 1, node, RecordDict(), config)).widened(outgoing.Way(outgoing.modes_of(config)))
    admits = [way.admits("fit", name, 0.5) for name in ("battery", "loss-before", "accuracy-after", "seconds-train")]
    assert admits == [not promise or {every}, True, True, True], (promise, admits)
assert "`battery` | number | " in "\\n".join(outgoing.table())
"""
# each of the codes in a child of a process that has imported what is large
IN_CHILDREN = """
import os, sys
import flwr.clientapp, hypothesis, pytest, torch
for code in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(code)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_new_number_of_every_client_keeps_promises_unless_it_says_why() -> None:
    """Each in a process of its own, which begins where the numbers of every client are declared."""
    codes = [NEW.format(promised=f", promised={why!r}", every=bool(why)) for why in ("", "a phone's battery")]
    subprocess.run([sys.executable, "-c", IN_CHILDREN, *codes], check=True)


@pytest.mark.parametrize(
    "config, modes",
    [
        ({}, {Mode.PLAIN}),
        ({"private": False, "dp-epsilon": 0.0}, {Mode.PLAIN}),
        ({"private": True, "dp-epsilon": 0}, {Mode.PRIVATE}),
        ({"dp-epsilon": 1}, {Mode.DP}),
        ({"private": "no", "dp-epsilon": False}, {Mode.PRIVATE, Mode.DP}),
    ],
)
def test_modes(config: dict[str, Scalar], modes: set[Mode]) -> None:
    assert outgoing.modes_of(config) == modes


def test_the_page_has_the_table() -> None:
    page = Path(outgoing.__file__).with_name("entries.md").read_text(encoding="utf-8")
    assert "\n".join(outgoing.table()) in page, "run `corolla reference`"
