""""""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.parameter import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.typing import Code, EvaluateRes, FitRes, GetPropertiesRes, Status
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from fl_app import weights
from fl_app.layout import Layout, Model
from fl_app.transport import wire
from fl_app.transport.wire import Download, Expected, Upload, WireError
from strategies.kernels.masks import pack
from tests.conftest import bools, f32
from tests.facts import rejected

OK = Status(Code.OK, "")
EXPECTED = Expected(d=10, b=2, num_params=10, num_selected=4, extras={"counts": ("<i8", (3,))})
MASK = bools("1100100001")
finite = st.floats(-(2.0**100), 2.0**100, width=32)
scalars = st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=20)


def upload(**changes: Any) -> Upload:
    model = Model(np.arange(10, dtype=np.float32), f32(0.5, -1))
    fields: dict[str, Any] = {
        "model": model,
        "mask": pack(MASK),
        "extras": {"counts": np.array([1, 2, 3])},
        "metrics": {"accuracy-after": 0.5},
        "num_examples": 7,
    }
    return Upload(**(fields | changes))


def as_reply(arrays: list[np.ndarray], num_examples: int, metrics: Mapping[str, Any]) -> RecordDict:
    """What Flower makes of the three things NumPyClient.fit returns."""
    result = FitRes(OK, ndarrays_to_parameters(arrays), num_examples, dict(metrics))
    return compat.fitres_to_recorddict(result, keep_input=False)


def parts(sent: Upload) -> tuple[list[np.ndarray], int, dict[str, Any]]:
    """What Flower reads from a reply."""
    result = compat.recorddict_to_fitres(wire.encode_upload(sent), keep_input=True)
    return parameters_to_ndarrays(result.parameters), result.num_examples, dict(result.metrics)


def reply(sent: Upload, **metrics: Any) -> RecordDict:
    arrays, num_examples, own = parts(sent)
    return as_reply(arrays, num_examples, {**own, **metrics})


def with_bytes(index: int, data: bytes, sent: Upload | None = None) -> RecordDict:
    """A good reply, one array's bytes replaced."""
    content = reply(sent or upload())
    record = content.array_records["fitres.parameters"]
    record[str(index)].data = data
    return content


def npy(array: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def refuse(content: RecordDict, *words: str, expected: Expected = EXPECTED) -> None:
    with pytest.raises(WireError) as info:
        wire.decode_upload(content, expected)
    for word in words:
        assert word in str(info.value), str(info.value)


# round trips


def test_upload_round_trip() -> None:
    sent = upload()
    got = wire.decode_upload(reply(sent), EXPECTED)
    assert got.model.params.tolist() == sent.model.params.tolist() and got.model.params.dtype == np.float32
    assert got.model.buffers.tolist() == [0.5, -1]
    assert got.mask is not None and got.mask.tolist() == pack(MASK).tolist()
    assert got.extras["counts"].tolist() == [1, 2, 3]
    assert got.num_examples == 7 and dict(got.metrics) == {"accuracy-after": 0.5}
    assert wire.payload_bytes(reply(sent)) == 4 * (10 + 2) + 2 + 3 * 8


@given(
    hnp.arrays(np.float32, st.integers(0, 30), elements=finite),
    hnp.arrays(np.float32, st.integers(0, 5), elements=finite),
    st.dictionaries(st.text(min_size=1, max_size=10), scalars, max_size=4),
    st.integers(0, 2**40),
)
def test_any_upload_round_trip(params: np.ndarray, buffers: np.ndarray, metrics: dict[str, Any], n: int) -> None:
    metrics = {name: value for name, value in metrics.items() if name not in (wire.ARRAYS, wire.ERROR)}
    sent = Upload(Model(params, buffers), metrics=metrics, num_examples=n)
    got = wire.decode_upload(reply(sent), Expected(len(params), len(buffers)))
    assert got.model.params.tobytes() == params.tobytes() and got.model.buffers.tobytes() == buffers.tobytes()
    assert got.mask is None and got.num_examples == n and dict(got.metrics) == metrics


@pytest.mark.parametrize("task", ["train", "collect", "evaluate"])
def test_download_round_trip(task: str) -> None:
    sent = Download(
        task,
        3,
        1,
        "abc",
        Model(f32(1, 2, 3), f32(4)),
        "000002-00",
        ("000001-00", "000002-00"),
        {"center": f32(7, 8)},
        {"mu": 0.5, "on": True},
    )
    content = wire.encode_download(sent)
    got = wire.decode_download(content, "evaluate" if task == "evaluate" else "fit")
    for field in ("task", "round", "attempt", "experiment", "state_version", "keep"):
        assert getattr(got, field) == getattr(sent, field)
    assert got.model.params.tolist() == [1, 2, 3] and got.model.buffers.tolist() == [4]
    assert got.extras["center"].tolist() == [7, 8] and dict(got.method) == {"mu": 0.5, "on": True}
    assert wire.payload_bytes(wire.encode_download(sent)) == 4 * 6
    assert got.model.params.flags.writeable, "torch warns about read-only arrays"


def test_an_empty_model_sends_no_bytes() -> None:
    empty = Model(np.zeros(0, np.float32), np.zeros(0, np.float32))
    down = Download("train", 1, 0, "abc", empty)
    ins = compat.recorddict_to_fitins(wire.encode_download(down), True)
    assert ins.parameters.tensors == [] and wire.payload_bytes(wire.encode_download(down)) == 0
    assert wire.decode_download(wire.encode_download(down), "fit").model.params.shape == (0,)
    got = wire.decode_upload(reply(Upload(empty, num_examples=3)), Expected(0, 0))
    assert got.model.nbytes == 0 and got.num_examples == 3


def test_equal_arrays_of_one_steps_downloads_are_one_in_memory() -> None:
    shared: dict[str, Any] = {}

    def arrays(params: np.ndarray) -> list[bytes]:
        content = wire.encode_download(Download("train", 1, 0, "e", Model(params, f32(7))), shared)
        return [array.data for array in content["fitins.parameters"].values()]

    params = f32(1, 2)
    first, equal = arrays(params), arrays(f32(1, 2))
    assert first[0] is equal[0] and first[1] is equal[1]
    # an array that was changed in place is another one
    params += 1
    changed = arrays(params)
    assert changed[0] == arrays(f32(2, 3))[0] != first[0] and changed[1] is first[1]


def test_a_message_that_was_read_is_freed_at_once() -> None:
    download = wire.encode_download(Download("train", 1, 0, "e", Model(f32(1), f32())))
    content = wire.encode_upload(upload())
    gone = [weakref.ref(download["fitins.parameters"]), weakref.ref(content["fitres.parameters"])]
    gc.disable()
    try:
        wire.payload_bytes(download)
        wire.decode_download(download, "fit")
        wire.payload_bytes(content)
        wire.take_aside(content)
        wire.decode_upload(content, EXPECTED)
        del download, content
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_array_data_is_not_copied() -> None:
    content = reply(upload())
    assert not wire.decode_upload(content, EXPECTED).model.params.flags.owndata


# what is refused, and how


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["params", "buffers"])
def test_non_finite_values(bad: float, where: str) -> None:
    model = Model(np.arange(10, dtype=np.float32), f32(0.5, -1))
    getattr(model, where)[1] = bad
    refuse(reply(upload(model=model)), f"array {where} has 1 non-finite values")


def test_variances_are_not_negative() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layout = Layout.of(module)
    expected, model = Expected.of(layout), weights.read(module)
    assert model.buffers.tolist() == [0, 0, 0, 1, 1, 1]
    # subnormal numbers and -0.0 are no lies
    model.buffers[:] = -5, -1e30, -0.0, -0.0, 1e-42, 3e38
    assert wire.decode_upload(reply(Upload(model)), expected).model.buffers.tolist() == model.buffers.tolist()
    model.buffers[3:5] = -1e-42, -1
    refuse(reply(Upload(model)), "array buffers has 2 negative variances", expected=expected)


def test_signalling_nan() -> None:
    bits = np.arange(10, dtype="<u4")
    bits[4] = 0x7F800001
    refuse(with_bytes(0, npy(bits.view("<f4"))), "array params has 1 non-finite values")


def test_wrong_length() -> None:
    short = Model(np.zeros(9, np.float32), f32(0, 0))
    refuse(reply(upload(model=short)), "array params has shape (9,), expected (10,)")
    refuse(with_bytes(0, npy(np.zeros((2, 5), np.float32))), "shape (2, 5), expected (10,)")
    refuse(reply(upload(mask=np.zeros(3, np.uint8))), "array mask has shape (3,), expected (2,)")


@pytest.mark.parametrize("dtype", ["<f8", "<f2", "<i4", ">f4"])
def test_wrong_dtype(dtype: str) -> None:
    refuse(with_bytes(0, npy(np.zeros(10, dtype))), f"array params has dtype {np.dtype(dtype)}, expected float32")


def test_wrong_dtype_of_a_mask_and_an_extra() -> None:
    refuse(with_bytes(2, npy(np.zeros(2, bool))), "array mask has dtype bool, expected uint8")
    refuse(with_bytes(3, npy(np.zeros(3, np.float32))), "array counts has dtype float32, expected int64")


def test_missing_renamed_and_extra_arrays() -> None:
    wanted = "expected the arrays ['params', 'buffers', 'mask', 'counts']"
    refuse(reply(upload(mask=None)), wanted, "got ['params', 'buffers', 'counts']")
    refuse(reply(upload(extras={"count": np.array([1, 2, 3])})), wanted, "'count']")
    refuse(reply(upload(extras={"counts": np.array([1, 2, 3]), "more": f32(1)})), wanted, "'more']")
    refuse(reply(upload(), **{wire.ARRAYS: "buffers,params,mask,counts"}), wanted)
    arrays, n, metrics = parts(upload())
    refuse(as_reply(list(arrays)[:3], n, metrics), wanted, "(3 sent)")
    refuse(as_reply([], n, metrics), wanted, "(0 sent)")
    refuse(as_reply(list(arrays), n, {}), wanted, "got [] (4 sent)")


def test_mask_with_another_number_of_ones() -> None:
    refuse(reply(upload(mask=pack(bools("1110100001")))), "mask has 5 ones, expected 4")
    refuse(reply(upload(mask=np.zeros(2, np.uint8))), "mask has 0 ones, expected 4")
    any_number = Expected(10, 2, 10, -1, EXPECTED.extras)
    wire.decode_upload(reply(upload(mask=np.zeros(2, np.uint8))), any_number)


@pytest.mark.parametrize("bit", range(10, 16))
def test_mask_with_ones_in_its_padding(bit: int) -> None:
    mask = pack(bools("1100100000"))
    mask[1] |= 1 << (bit - 8)
    refuse(reply(upload(mask=mask)), "mask has ones beyond its 10 bits")


def test_a_mask_without_padding() -> None:
    expected = Expected(0, 0, 8, 8)
    got = wire.decode_upload(reply(Upload(Model(f32(), f32()), np.array([255], np.uint8), num_examples=1)), expected)
    assert got.mask is not None and got.mask.tolist() == [255]


@pytest.mark.parametrize("keep", [0, 5, 9, 60, 127, 128, 140, 167])
def test_truncated_bytes(keep: int) -> None:
    data = npy(np.zeros(10, np.float32))
    assert len(data) == 128 + 40
    refuse(with_bytes(0, data[:keep]), "array params")


def test_bytes_too_many() -> None:
    refuse(with_bytes(0, npy(np.zeros(10, np.float32)) + b"\0"), "array params has 41 bytes")


def test_pickled_objects_are_never_loaded() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("the pickle was executed",))

    pickled = npy(np.array([Bomb()] * 10, dtype=object), allow_pickle=True)
    refuse(with_bytes(0, pickled), "array params has dtype object, expected float32")


numbers = hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.unsigned_integer_dtypes() | hnp.floating_dtypes()


@given(hnp.arrays(numbers, hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=3)), st.booleans())
def test_headers_read_as_numpy_reads_them(array: np.ndarray, fortran: bool) -> None:
    array = np.asfortranarray(array) if fortran else array
    data = npy(array)
    read = wire.viewed(FlowerArray(dtype="", shape=(), stype="", data=data))
    assert read.dtype == array.dtype and read.shape == array.shape and read.tobytes() == array.tobytes()


def test_what_a_client_sends_is_not_parsed_as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ast.literal_eval", lambda _: pytest.fail("parsed as Python"))
    assert wire.decode_upload(wire.encode_upload(upload()), EXPECTED).num_examples == 7


def test_other_format_versions_and_fortran_order() -> None:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.zeros(10, np.float32), version=(2, 0))
    refuse(with_bytes(0, stream.getvalue()), "array params is not a NumPy array")
    matrix = Expected(0, 0, extras={"m": ("<f4", (2, 3))})
    sent = Upload(Model(f32(), f32()), extras={"m": np.ones((2, 3), np.float32)}, num_examples=1)
    fortran = with_bytes(0, npy(np.asfortranarray(np.ones((2, 3), np.float32))), sent)
    refuse(fortran, "array m has shape (2, 3)", expected=matrix)


@given(st.binary(max_size=300))
def test_garbage_bytes(data: bytes) -> None:
    refuse(with_bytes(0, data), "array params")


@given(st.integers(0, 127), st.integers(0, 255), st.integers(0, 127), st.integers(0, 255))
def test_a_damaged_header(i: int, a: int, j: int, b: int) -> None:
    """Two bytes of the header replaced: it reads as the same header, or is refused as any other array is."""
    data = bytearray(npy(np.zeros(10, np.float32)))
    data[i], data[j] = a, b
    try:
        got = wire.decode_upload(with_bytes(0, bytes(data)), EXPECTED)
    except WireError as error:
        assert str(error).startswith("array params")
    else:
        assert got.model.params.shape == (10,)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (10,)",
        b"(" * 150,
        b"{'descr': 1, 'fortran_order': 0, 'shape': 3}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-10,), }",
        b"{'descr': [], 'fortran_order': False, 'shape': (10,)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1e3,)}",
        b"\xff\xfe" * 20,
    ],
)
def test_headers_that_are_not_headers(header: bytes) -> None:
    padded = header.ljust(118) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + bytes(40)
    refuse(with_bytes(0, data), "array params")


# scalars


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"fitres.parameters": ArrayRecord(), "fitres.metrics": ConfigRecord({"arrays": ""})}),
        RecordDict(
            {"fitres.metrics": ConfigRecord({"arrays": ""}), "fitres.num_examples": MetricRecord({"num_examples": 1})}
        ),
        RecordDict(
            {
                "fitres.parameters": ArrayRecord(),
                "fitres.metrics": ConfigRecord(),
                "fitres.num_examples": MetricRecord({"examples": 1}),
            }
        ),
    ],
)
def test_replies_that_are_no_replies(records: RecordDict) -> None:
    refuse(records, "malformed reply", expected=Expected(0, 0))


def test_garbage_metrics() -> None:
    for garbage in ([1.0, 2.0], b"bytes", ["a"]):
        refuse(reply(upload(), garbage=garbage), "malformed reply", "garbage must be a scalar")


@pytest.mark.parametrize("count", [-1, 1.5, [3]])
def test_bad_num_examples(count: Any) -> None:
    content = reply(upload())
    content.metric_records["fitres.num_examples"] = MetricRecord({"num_examples": count})
    refuse(content, f"num_examples must be an integer >= 0, got {count!r}")


def test_a_reported_error_is_the_message() -> None:
    refuse(as_reply([], 0, {wire.ERROR: "client 3: out of memory"}), "client 3: out of memory")


@pytest.mark.parametrize("value", [7.0, -0.1, np.inf, True, "0.5"])
def test_an_accuracy_that_is_none(value: Any) -> None:
    with rejected(WireError, "", "metric accuracy-after", "[0, 1]"):
        wire.number({"accuracy-after": value}, "accuracy-after", 0, 1)


@pytest.mark.parametrize("value", [0, 1, 0.25, float("nan")])
def test_an_accuracy_that_is_one(value: float) -> None:
    assert wire.number({"accuracy-after": value}, "accuracy-after", 0, 1) == pytest.approx(value, nan_ok=True)
    assert np.isnan(wire.number({}, "accuracy-after", 0, 1))


# evaluation and properties


def evaluation(loss: Any = 0.5, num_examples: Any = 4, **metrics: Any) -> RecordDict:
    content = compat.evaluateres_to_recorddict(EvaluateRes(OK, 0.0, 0, metrics))
    content.metric_records["evaluateres.loss"] = MetricRecord({"loss": loss})
    content.metric_records["evaluateres.num_examples"] = MetricRecord({"num_examples": num_examples})
    return content


SHA = {"sha256": "ab" * 32}


def test_evaluation_round_trip() -> None:
    assert wire.decode_evaluation(evaluation(accuracy=0.75, **SHA)) == (0.5, 4, {"accuracy": 0.75, **SHA})
    loss, num_examples, _ = wire.decode_evaluation(evaluation(float("nan"), 0, accuracy=float("nan"), **SHA))
    assert np.isnan(loss) and num_examples == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (RecordDict(), "malformed reply"),
        (evaluation(accuracy=[0.5], **SHA), "malformed reply"),
        (evaluation(loss=[0.5], **SHA), "loss must be a number >= 0, got [0.5]"),
        (evaluation(loss=-1.0, **SHA), "loss must be a number >= 0, got -1.0"),
        (evaluation(num_examples=-4, **SHA), "num_examples must be an integer >= 0, got -4"),
        (evaluation(accuracy=0.5), "sha256 must be 64 hexadecimal digits, got ''"),
        (evaluation(accuracy=0.5, sha256="xyz"), "sha256 must be 64 hexadecimal digits, got 'xyz'"),
        (evaluation(error="client 3: no such state"), "client 3: no such state"),
    ],
)
def test_bad_evaluations(content: RecordDict, words: str) -> None:
    with pytest.raises(WireError) as info:
        wire.decode_evaluation(content)
    assert words in str(info.value)


def test_properties() -> None:
    good = compat.getpropertiesres_to_recorddict(GetPropertiesRes(OK, {"client-id": 3, "name": "x"}))
    assert wire.decode_properties(good) == {"client-id": 3, "name": "x"}
    with pytest.raises(WireError, match="malformed properties"):
        wire.decode_properties(RecordDict())
    bad = compat.getpropertiesres_to_recorddict(GetPropertiesRes(OK, {"client-id": b"3"}))
    with rejected(WireError, "", "malformed properties", "client-id", "got bytes"):
        wire.decode_properties(bad)


def test_a_download_with_arrays_missing() -> None:
    content = wire.encode_download(Download("train", 1, 0, "e", Model(f32(1), f32())))
    content.array_records["fitins.parameters"].clear()
    with rejected(WireError, "", "expected the arrays", "['params']", "got 0"):
        wire.decode_download(content, "fit")


def test_a_message_is_taken_apart_as_flower_does_and_keeps_no_bytes() -> None:
    """The arrays are the client's own, to write into."""
    extras = {"packed": np.arange(6, dtype=np.uint8).reshape(2, 3), "scalar": np.array(2.5)}
    content = wire.encode_download(Download("train", 1, 0, "abc", Model(f32(1, 2, 3), f32(4)), extras=extras))
    ins = compat.recorddict_to_fitins(content, keep_input=True)
    expected = parameters_to_ndarrays(ins.parameters)
    got = wire.decode_download(content, "fit")
    assert got.round == ins.config["round"] and not content.array_records["fitins.parameters"]
    arrays = [got.model.params, got.model.buffers, *got.extras.values()]
    for array, other in zip(arrays, expected, strict=True):
        assert array.dtype == other.dtype and array.tolist() == other.tolist() and array.flags.writeable


def test_what_is_no_array_is_refused() -> None:
    content = wire.encode_download(Download("train", 1, 0, "abc", Model(f32(1, 2, 3), f32(4))))
    content.array_records["fitins.parameters"]["0"] = FlowerArray(dtype="", shape=(), stype="", data=b"junk")
    with rejected(WireError, "", "NumPy's format"):
        wire.decode_download(content, "fit")


def test_replies_are_flowers_own() -> None:
    arrays, metrics = [f32(1, 2), np.zeros(3, np.uint8)], {"loss-after": 0.5, "name": "x"}
    status = Status(Code.OK, "Success")
    for sent in (arrays, []):
        fit = FitRes(status, ndarrays_to_parameters(sent), 7, dict(metrics))
        flowers = compat.fitres_to_recorddict(fit, keep_input=True)
        numbered = {str(k): array for k, array in enumerate(sent)}
        made = wire.fit_reply(dict(wire.named_record(numbered)), 7, dict(metrics))
        assert dict(made["fitres.metrics"]) == metrics and made["fitres.status"] == flowers["fitres.status"]
        theirs = compat.recorddict_to_fitres(made, keep_input=True)
        assert [*map(bytes, theirs.parameters.tensors)] == [*map(npy, sent)] and theirs.num_examples == 7
    evaluation = EvaluateRes(status, 0.25, 7, dict(metrics))
    assert wire.evaluate_reply(0.25, 7, dict(metrics)) == compat.evaluateres_to_recorddict(evaluation)


def test_only_scalars_travel_as_metrics() -> None:
    with pytest.raises(TypeError):
        wire.fit_reply({}, 1, {"accuracy": np.float32(1)})  # type: ignore[dict-item]


def test_headers_of_any_declared_length_make_no_negative_bytes() -> None:
    lying = ArrayRecord(
        {f"x{k}": FlowerArray("uint8", (0,), "numpy.ndarray", b"\x93NUMPY\x01\x00\xff\xff") for k in range(3)}
    )
    assert wire.payload_bytes(RecordDict({"fitres.parameters": lying})) == 0


# More -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metrics", [{"accuracy-after": "x" * 2**21}, {"x" * 2**21: 1.0}, {"arrays": "x" * 2**21}])
def test_a_text_of_any_length_makes_one_short_line(metrics: dict[str, Any]) -> None:
    with rejected(WireError, "", "has 2097152 characters", "most 1048576 are allowed") as info:
        wire.decode_upload(reply(upload(), **metrics), EXPECTED)
    assert len(str(info.value)) <= 1000 and "\n" not in str(info.value)


def test_a_wire_error_is_one_short_line() -> None:
    assert str(WireError("one\ntwo " + "x" * 5000)) == "one two " + "x" * 492
