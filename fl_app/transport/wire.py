"""The one codec between server and client: typed downloads and uploads as Flower records, and back.

A message is a list of arrays and a flat table of scalars (`fitins.*` / `fitres.*`, Flower's compat records, which
NumPyClient uses). The table's `arrays` names the arrays in order. Bytes are counted as array bytes, without framing.
Everything from a client is checked here, before it is copied: names, shapes, dtypes, finiteness, number of ones in a
mask.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.typing import Code
from numpy.typing import NDArray

from fl_app import reasons
from fl_app.errors import plain
from fl_app.keys import Scalar
from fl_app.layout import NOTHING, Layout, Model
from fl_app.metrics import MAX_NUMBER, range_error
from fl_app.metrics import METRIC_ERRORS as METRIC_ERRORS
from fl_app.run_secret import experiment_of
from fl_app.transport.flower_patches import ReceivedArray, fill

Array = NDArray[np.generic]
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
ARRAYS, ERROR = "arrays", "error"
# Entry of a site's reply beside ERROR: the error's text, which few sites let leave.
DETAILS = "details"
# Name of an upload's record with its metrics, or with the client's error.
RESULT = "fitres.metrics"
# Version of this file's messages. It grows with every change that a node of an earlier version would misread. Nodes that send
# none are of the first.
WIRE_VERSION = "1"
# Type of the message that asks a node for its properties, or a question of a private round.
QUERY = "get_properties"
# Task of a question to one client: seal the sketches' key for others. The answer's entry, which a client's download has, too.
SEAL, SEALED = "seal", "private-sealed"
# Tasks of questions once all have answered or dropped out: agree on those that are left, and open their sum.
AGREE, OPEN = "agree", "open"
# Task of a question to members: sign the split of their aggregation group. The answer's entry; and the splits so far, in
# questions and downloads.
SPLIT, SIGNED, SPLITS = "split", "private-signed", "private-splits"
_QUESTIONS = (SEAL, AGREE, OPEN, SPLIT)
# Metrics of an evaluation: hashes of the evaluated model's parameters and buffers.
SHA256, BUFFERS_SHA256 = "sha256", "buffers-sha256"
# Metric: the generation of state that this message made, "" without any.
STATE_VERSION = "state-version"
# Scalar of a download: how often the schedule `plateau` has lowered the learning rate.
DROPS = "rate-drops"
# Scalar of a client's first download in a run that goes on from another one (fl_app/server/start.py): that run's secret,
# the client's id and its state's generation there, as JSON.
STATE_OF = "state-of"
# Metric of a client with damaged state: the earlier generation that it continued from.
STATE_USED = "state-used"
# Prefix of the scalars of private rounds. As a metric: the attempt of the masks in an upload.
PRIVATE = "private"
# Metrics of a client on the server's machine: the lines that it printed, and the traceback of its error.
PRINTED, TRACEBACK = "printed", "traceback"
# Properties of a site with its own data: the names of its features, or in private runs a tag of them for each client.
FEATURES, FEATURE_TAGS = "feature-names", f"{PRIVATE}-feature-tags"
# Extra array of a private round: params, buffers and weight in fixed point under masks, uint64 [d + b + 1].
SUM = "masked"
# Entries of an upload and of answers: sealed shares of the upload's own mask; a signature of the survivors; shares, and keys with
# the members that dropped out.
SHARES, AGREED, OPENED, BETWEEN = f"{PRIVATE}-shares", f"{PRIVATE}-agreed", f"{PRIVATE}-opened", f"{PRIVATE}-between"
# Entry of an upload: hashes of its shares, by member, and of the mask's seed. A question has those for its client.
COMMITTED = f"{PRIVATE}-commitments"
# Metric of the reply to "forget" in a private run: whether a value was ever clipped to `private-range`.
CLIPPED = f"{PRIVATE}-clipped"
# Fewest clients in a sum of a private round: with two, each would know the other's model.
GROUP_MIN = 3
# Environment variable, set in a simulation with Ray: the number of clients that train at the same time on this machine;
# 0: they are on others.
SIMULATION = "COROLLA_SIMULATION"
# Key of a node's config: where its keys for private runs are.
PRIVATE_KEYS = "private-keys"
# Another one: the name of the site, which is the client's if the data name none.
NODE_NAME = "name"
# Value in place of a path: keys made from the run's seed, if all clients are on one machine.
SEED_KEYS = "seed"
# Keys of a node's config: the node is in the command's process; it is in a process for a simulation's clients.
IN_PROCESS, SIMULATED = "in-process", "simulated"
# Number of the run in a process for a simulation's clients, as Flower numbers a deployment's runs.
SIMULATED_RUN = 1
# Most characters of a name or a text among the scalars; class counts of 100,000 classes fit.
MAX_TEXT = 2**20
# Dtype of a round's uploaded parameters and statistics; the server computes with float32. It does not affect the masked sums of
# private runs, which are integers, nor collected personal models, which travel in the dtype WHOLE, as they were hashed.
UPLOADED, WHOLE = "<f4", "<f4"
_LINE = 500
_SCALARS = frozenset({bool, int, float, str})
_HEADER = re.compile(
    r"{'descr': '([<|>][A-Za-z]\d{0,9})', 'fortran_order': (True|False), 'shape': \((\d{1,18},|\d{1,18}(?:, \d{1,18})+|)\), } *\n"
)
_SUCCESS = {"code": Code.OK.value, "message": "Success"}


def simulated_node(client_id: int, num_clients: int, where: str) -> dict[str, Scalar]:
    """Return the node config of a client on this machine. where: IN_PROCESS or SIMULATED."""
    return {"partition-id": client_id, "num-partitions": num_clients, PRIVATE_KEYS: SEED_KEYS, where: True}


class WireError(ValueError):
    """A message breaks the protocol. The text states how, on one short line; the caller knows the client."""

    def __init__(self, text: str) -> None:
        super().__init__(plain(" ".join(text.split()))[:_LINE])


class OtherArrays(WireError):
    """An upload has other arrays than its form. more: the names of those that the form does not have."""

    def __init__(self, text: str, more: Sequence[str]) -> None:
        super().__init__(text)
        self.more = more


@dataclass(frozen=True)
class Download:
    """The server's message to one client for one task.

    secret: of the run's server alone. model: the tensors that travel, packed. extras: further arrays of the method.
    state_version: the generation of client state to load ("" for none). keep: generations that a checkpoint names.
    method: scalars for the method's client half.
    """

    # "train", "evaluate", "collect", "forget" at the run's end: remove the client's state, or a question of a private round
    task: str
    round: int
    attempt: int
    secret: str
    model: Model
    state_version: str = ""
    keep: tuple[str, ...] = ()
    extras: Mapping[str, Array] = field(default_factory=dict)
    method: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def experiment(self) -> str:
        """The experiment's id, under which clients keep state and notes. Only who has the secret reaches them."""
        return experiment_of(self.secret)


@dataclass(frozen=True)
class Upload:
    """A client's reply: the tensors that travel, a packed mask if the method has one, extra arrays, scalars.

    dtype: of the tensors on the wire, "" for UPLOADED.
    """

    model: Model
    mask: NDArray[np.uint8] | None = None
    extras: Mapping[str, Array] = field(default_factory=dict)
    metrics: Mapping[str, Scalar] = field(default_factory=dict)
    num_examples: int = 0
    dtype: str = ""


@dataclass(frozen=True)
class Expected:
    """The required form of an upload.

    d, b: lengths of the travelling params and buffers. num_params: bits in a mask (0: no mask is sent). num_selected:
    ones in it (-1: any). extras: dtype and shape by name. dtype: of params and buffers on the wire, "" for UPLOADED.
    variances: slices [start, stop) of the buffers that hold BatchNorm's variances, which are never negative.
    """

    d: int
    b: int
    num_params: int = 0
    num_selected: int = -1
    extras: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    dtype: str = ""
    variances: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        layout: Layout,
        *,
        num_params: int = 0,
        num_selected: int = -1,
        extras: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
        dtype: str = "",
    ) -> Expected:
        """Return the form of an upload with the tensors of a layout, and with a method's additions."""
        variances = tuple((slot.start, slot.stop) for slot in layout.variances)
        return cls(layout.d, layout.b, num_params, num_selected, extras or {}, dtype, variances)

    @property
    def nbytes(self) -> int:
        """Bytes of an upload's arrays."""
        return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.shapes().values())

    def blank(self) -> Upload:
        """Return an upload of this form: all zeros, except for the ones that its mask must have."""
        mask = None
        if self.num_params:
            ones = np.arange(self.num_params) < max(0, self.num_selected)
            mask = np.packbits(ones, bitorder="little")
        model = Model(np.zeros(self.d, np.float32), np.zeros(self.b, np.float32))
        return Upload(model, mask, {name: np.zeros(shape, dtype) for name, (dtype, shape) in self.extras.items()})

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape by array name, in wire order. Empty arrays do not travel."""
        out: dict[str, tuple[str, tuple[int, ...]]] = {
            "params": (self.dtype or UPLOADED, (self.d,)),
            "buffers": (self.dtype or UPLOADED, (self.b,)),
        }
        if self.num_params:
            out["mask"] = ("|u1", (-(-self.num_params // 8),))
        out |= self.extras
        return {name: spec for name, spec in out.items() if math.prod(spec[1])}


# Server side --------------------------------------------------------------------------------------------------------


def encode_download(download: Download, shared: dict[str, FlowerArray] | None = None) -> RecordDict:
    """Encode a download as Flower's fit instructions ("train", "collect", "forget"), evaluate instructions or a question.

    shared: the last arrays by name. Downloads that are encoded with it share the bytes of arrays that are equal.
    """
    arrays = {"params": download.model.params, "buffers": download.model.buffers, **download.extras}
    shared, sent = {} if shared is None else shared, dict[str, FlowerArray]()
    for name, array in arrays.items():
        if array.size:
            sent[name], known = _sent(array), shared.get(name)
            if known is not None and known.data == sent[name].data:
                sent[name] = known
    shared |= sent
    said = {
        "task": download.task,
        "round": download.round,
        "attempt": download.attempt,
        "experiment": download.secret,
        "state-version": download.state_version,
        "keep": ",".join(download.keep),
        ARRAYS: ",".join(sent),
        **download.method,
    }
    if download.task in _QUESTIONS:
        return fill(RecordDict(), {"getpropertiesins.config": _config(said)})
    what = "evaluateins" if download.task == "evaluate" else "fitins"
    return fill(RecordDict(), {f"{what}.parameters": _record(sent), f"{what}.config": _config(said)})


def encode_query() -> RecordDict:
    """Encode the question for a node's properties."""
    return fill(RecordDict(), {"getpropertiesins.config": ConfigRecord()})


def payload_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's arrays, without headers and framing, as a round's record counts them."""
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            for sent in record.values():
                pieces, start = _received(sent)
                # a client may write any length into its header
                total += max(0, sum(map(len, pieces)) - 10 - int.from_bytes(start[8:10], "little"))
    return total


def decode_properties(content: RecordDict) -> dict[str, Scalar]:
    """Return a node's properties. Raises WireError if they are missing or malformed."""
    try:
        return _scalars(_record_of(content, "getpropertiesres.properties", ConfigRecord))
    except Exception as error:  # Flower's decoder may raise any error
        raise WireError(f"malformed properties: {error!r:.{_LINE}}") from None


def decode_answer(content: RecordDict) -> dict[str, Scalar]:
    """Return the answer to a question. Raises WireError for a client's reported error, and for a malformed reply."""
    answer = decode_properties(content)
    if why := error_in(answer):
        raise WireError(why)
    return answer


def decode_upload(content: RecordDict, expected: Expected) -> Upload:
    """Return a train reply, decoded and checked. Array data is not copied (read-only views into the message).

    Raises WireError for a client's reported error and for every breach of the protocol.
    """
    try:
        record = _record_of(content, "fitres.parameters", ArrayRecord)
        metrics = _scalars(_record_of(content, RESULT, ConfigRecord))
        num_examples = _record_of(content, "fitres.num_examples", MetricRecord)["num_examples"]
        tensors = [] if compat.EMPTY_TENSOR_KEY in record else [*record.values()]
    except Exception as error:
        raise WireError(f"malformed reply: {error!r:.{_LINE}}") from None
    if why := error_in(metrics):
        raise WireError(why)
    if type(num_examples) is not int or num_examples < 0:
        raise WireError(f"num_examples must be an integer >= 0, got {reprlib.repr(num_examples)}")
    shapes = expected.shapes()
    names = [*filter(None, str(metrics.pop(ARRAYS, "")).split(","))]
    if names != [*shapes] or len(tensors) != len(names):
        more = [name for name in names if name not in shapes]
        raise OtherArrays(f"expected the arrays {list(shapes)}, got {reprlib.repr(names)} ({len(tensors)} sent)", more)
    arrays: dict[str, Array] = {}
    for name, tensor in zip(names, tensors, strict=True):
        arrays[name] = _load(name, tensor, *shapes[name])
    mask = arrays.pop("mask", None)
    if mask is not None:
        padding, bits = mask.size * 8 - expected.num_params, mask.view(np.uint8)
        if padding and bits[-1] >> (8 - padding):
            raise WireError(f"mask has ones beyond its {expected.num_params} bits")
        ones = int(np.bitwise_count(bits).sum(dtype=np.int64))
        if expected.num_selected >= 0 and ones != expected.num_selected:
            raise WireError(f"mask has {ones} ones, expected {expected.num_selected}")
    params = np.asarray(arrays.pop("params", ()), np.float32)
    buffers = np.asarray(arrays.pop("buffers", ()), np.float32)
    check_variances(buffers, expected)
    return Upload(Model(params, buffers), mask, arrays, metrics, num_examples)  # type: ignore[arg-type]


def decode_evaluation(content: RecordDict, hashed: bool = True) -> tuple[float, int, dict[str, Scalar]]:
    """Return (loss, test samples, metrics) of an evaluate reply. Raises WireError as decode_upload.

    hashed: whether the metrics must have the hashes of the client's model. Otherwise they are left out.
    """
    try:
        result = compat.recorddict_to_evaluateres(content)
        metrics = _scalars(result.metrics)
    except Exception as error:
        raise WireError(f"malformed reply: {error!r:.{_LINE}}") from None
    if why := error_in(metrics):
        raise WireError(why)
    if not isinstance(result.loss, float) or result.loss < 0:
        raise WireError(f"loss must be a number >= 0, got {reprlib.repr(result.loss)}")
    if type(result.num_examples) is not int or result.num_examples < 0:
        raise WireError(f"num_examples must be an integer >= 0, got {reprlib.repr(result.num_examples)}")
    if not hashed:
        metrics = {name: value for name, value in metrics.items() if name not in (SHA256, BUFFERS_SHA256)}
    for name in (SHA256, BUFFERS_SHA256)[: 1 + (BUFFERS_SHA256 in metrics)] if hashed else ():
        if not re.fullmatch("[0-9a-f]{64}", str(value := metrics.get(name, ""))):
            raise WireError(f"{name} must be 64 hexadecimal digits, got {reprlib.repr(value)}")
    return number({"loss": result.loss}, "loss", 0), result.num_examples, metrics


def take_aside(content: RecordDict) -> tuple[str, str, str]:
    """Return a reply's error, printed lines and traceback. The last two are removed from the reply."""
    found = dict.fromkeys((ERROR, PRINTED, TRACEBACK), "")
    for record in content.values():
        if isinstance(record, ConfigRecord):
            for name in found:
                text = record.get(name) if name == ERROR else record.pop(name, None)
                if isinstance(text, str):
                    found[name] = text[:MAX_TEXT]
    return found[ERROR], found[PRINTED], found[TRACEBACK]


def hashes(model: Model) -> dict[str, str]:
    """Return the hashes of the model that a client is evaluated with, as metrics.

    They are the SHA-256 of its parameters, and of its buffers if it has any.
    """
    found = {SHA256: hashlib.sha256(model.params.tobytes()).hexdigest()}
    if model.buffers.size:
        found[BUFFERS_SHA256] = hashlib.sha256(model.buffers.tobytes()).hexdigest()
    return found


def sent_hash(download: Download) -> str:
    """Return the SHA-256 of all arrays that a client is sent: parameters, buffers, and further ones by name."""
    found = hashlib.sha256()
    for name, array in [
        ("params", download.model.params),
        ("buffers", download.model.buffers),
        *download.extras.items(),
    ]:
        found.update(f"{name} {array.dtype} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def error_in(entries: Mapping[str, Scalar]) -> str:
    """Return the error in a client's reply, on one line; "" if there is none.

    A site sends a reason. It becomes a sentence, unless the site sends details, too.
    """
    if not (error := entries.get(ERROR)):
        return ""
    if details := entries.get(DETAILS):
        return one_line(details)
    reason = reasons.read(error)
    return reason.sentence if reason else one_line(error)


def one_line(text: object) -> str:
    """Return a client's text on one line, for logs that others read. Of a long one, 500 characters: front and end."""
    line = plain(" ".join(str(text).split()))
    return line if len(line) <= _LINE else f"{line[: _LINE // 2]} ... {line[5 - _LINE // 2 :]}"


def number(metrics: Mapping[str, Scalar], name: str, low: float = -MAX_NUMBER, high: float = MAX_NUMBER) -> float:
    """Return a metric as a number, NaN if it is absent. Raises WireError if it is not in [low, high]."""
    value = metrics.get(name, math.nan)
    if error := range_error(name, value, low, high):
        raise WireError(error)
    return float(value)


def state_version(round: int, attempt: int) -> str:
    """Return the name of the generation of client state that a message makes."""
    return f"{round:06d}-{attempt:06d}"


# Flower's `RecordDict.array_records`, and its siblings, return a dict in a reference cycle with the content: a whole
# message would stay in memory until the garbage collector's next full pass.


def _record_of(content: RecordDict, name: str, kind: type[R]) -> R:
    """Return a message's record. Raises KeyError if there is none of this name and kind."""
    record = content[name]
    if not isinstance(record, kind):
        raise KeyError(name)
    return record


def _scalars(record: Mapping[str, object] | ConfigRecord) -> dict[str, Scalar]:
    out: dict[str, Scalar] = {}
    for name, value in record.items():
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(f"{name[:80]} must be a scalar, got {type(value).__name__}")
        length = max(len(name), len(value) if isinstance(value, str) else 0)
        if length > MAX_TEXT:
            raise ValueError(f"{name[:80]} has {length} characters, at most {MAX_TEXT} are allowed")
        out[name] = value
    return out


# Client side --------------------------------------------------------------------------------------------------------


def decode_download(content: RecordDict, what: str) -> Download:
    """Return a download, and free the arrays' bytes in its message.

    what: "fit", "evaluate", or "getproperties" for a question; one without a task asks for the node's properties. The arrays
    are copies that the receiver may write into. Raises WireError and KeyError if the message is no download.
    """
    scalars = _scalars(_record_of(content, f"{what}ins.config", ConfigRecord))
    if what == "getproperties" and "task" not in scalars:
        return Download("", 0, 0, "", NOTHING)
    names = [*filter(None, str(scalars.pop(ARRAYS)).split(","))]
    record = ArrayRecord() if what == "getproperties" else _record_of(content, f"{what}ins.parameters", ArrayRecord)
    record.pop(compat.EMPTY_TENSOR_KEY, None)
    if len(names) != len(record):
        raise WireError(f"expected the arrays {names}, got {len(record)}")
    arrays: dict[str, Array] = {}
    for name, key in zip(names, [*record], strict=True):
        arrays[name] = viewed(record.pop(key)).copy()
    return Download(
        task=str(scalars.pop("task")),
        round=int(scalars.pop("round")),
        attempt=int(scalars.pop("attempt")),
        secret=str(scalars.pop("experiment")),
        model=Model(
            np.asarray(arrays.pop("params", ()), np.float32), np.asarray(arrays.pop("buffers", ()), np.float32)
        ),
        state_version=str(scalars.pop("state-version")),
        keep=tuple(filter(None, str(scalars.pop("keep")).split(","))),
        extras=arrays,
        method=scalars,
    )


def encode_upload(upload: Upload) -> RecordDict:
    """Return an upload as a reply of Flower's. Raises WireError if values do not fit their dtype on the wire."""
    arrays: dict[str, Array] = {"params": upload.model.params, "buffers": upload.model.buffers}
    if upload.mask is not None:
        arrays["mask"] = upload.mask
    sent: dict[str, FlowerArray] = {}
    for name, array in (arrays | dict(upload.extras)).items():
        # the server refuses a method's array of another dtype
        if name in ("params", "buffers") and array.dtype == np.float32:
            given = array
            with np.errstate(over="ignore"):
                array = given.astype(upload.dtype or UPLOADED, copy=False)
            if array is not given and (lost := np.count_nonzero(np.isinf(array) & np.isfinite(given))):
                raise WireError(f"array {name} has {lost} values beyond {array.dtype}, its dtype on the wire")
        if array.size:
            sent[name] = _sent(array)
    return fit_reply(sent, upload.num_examples, {ARRAYS: ",".join(sent), **upload.metrics})


# Replies as Flower's NumPyClient makes them of the results of its functions.


def fit_reply(arrays: Mapping[str, FlowerArray], num_examples: int, metrics: Mapping[str, object]) -> RecordDict:
    """Return the content of a reply to "train", "collect" or "forget". arrays: in order."""
    return fill(
        RecordDict(),
        {
            RESULT: _config(metrics),
            "fitres.num_examples": fill(MetricRecord(), {"num_examples": num_examples}),
            "fitres.parameters": _record(arrays),
            "fitres.status": _config(_SUCCESS),
        },
    )


def evaluate_reply(loss: float, num_examples: int, metrics: Mapping[str, object]) -> RecordDict:
    """Return the content of a reply to "evaluate"."""
    return fill(
        RecordDict(),
        {
            "evaluateres.loss": MetricRecord({"loss": loss}),
            "evaluateres.num_examples": MetricRecord({"num_examples": num_examples}),
            "evaluateres.metrics": _config(metrics),
            "evaluateres.status": _config(_SUCCESS),
        },
    )


def properties_reply(properties: Mapping[str, object]) -> RecordDict:
    """Return the content of a reply to a question."""
    records = {"getpropertiesres.properties": _config(properties), "getpropertiesres.status": _config(_SUCCESS)}
    return fill(RecordDict(), records)


def failed_reply(kind: str, entries: Mapping[str, Scalar], who: Mapping[str, Scalar] | None = None) -> RecordDict:
    """Return the content of a reply with an error. kind: as in outgoing.py. who: entries that only a reply to a question has."""
    if kind == "fit":
        return fit_reply({}, 0, entries)
    return evaluate_reply(0.0, 0, entries) if kind == "evaluate" else properties_reply({**entries, **(who or {})})


def _config(scalars: Mapping[str, object]) -> ConfigRecord:
    """Return scalars as a record of Flower's. Raises TypeError for a value that is no scalar."""
    if {*map(type, scalars.values())} <= _SCALARS:
        return fill(ConfigRecord(), scalars)
    return ConfigRecord(dict(scalars))  # type: ignore[arg-type]


def _record(arrays: Mapping[str, FlowerArray]) -> ArrayRecord:
    """Return arrays as a record of Flower's, numbered in order."""
    numbered = {str(k): array for k, array in enumerate(arrays.values())}
    if not numbered:
        numbered[compat.EMPTY_TENSOR_KEY] = FlowerArray(dtype="", shape=(), stype="numpy.ndarray", data=b"")
    return fill(ArrayRecord(), numbered)


# Arrays as bytes: NumPy's own format, as NumPyClient reads and writes it ----------------------------------------------


def named_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """Return arrays as a record of Flower's under their names, as `ArrayRecord` makes it of NumPy's arrays."""
    return fill(ArrayRecord(), {name: _sent(array, str(array.dtype), array.shape) for name, array in arrays.items()})


def _sent(array: Array, dtype: str = "", shape: tuple[int, ...] = ()) -> FlowerArray:
    """Return an array as Flower's, with its bytes."""
    data = b"".join([_header_of(array.dtype, array.shape), np.ascontiguousarray(array).data])
    return FlowerArray(dtype=dtype, shape=shape, stype="numpy.ndarray", data=data)


@functools.lru_cache(maxsize=256)
def _header_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of NumPy's format 1.0 for a contiguous array."""
    out = io.BytesIO()
    fields = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
    np.lib.format.write_array_header_1_0(out, fields)
    return out.getvalue()


def viewed(sent: FlowerArray) -> Array:
    """Return an array of a record: a view of its bytes that cannot be written into. Raises WireError if it is none."""
    pieces, start = _received(sent)
    try:
        dtype, shape, fortran = _header(start)
        values = np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), dtype, offset=len(start))
        return values.reshape(shape, order="F" if fortran else "C")
    except (ValueError, TypeError) as error:
        raise WireError(f"an array is not in NumPy's format: {error}") from None


def _load(name: str, sent: FlowerArray, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return a view of one array's bytes.

    Raises WireError unless the header names exactly this dtype and shape, and all floats are finite.
    """
    pieces, start = _received(sent)
    try:
        got_dtype, got_shape, fortran = _header(start)
    except (ValueError, TypeError) as error:
        raise WireError(f"array {name} is not a NumPy array: {error}") from None
    if got_dtype != np.dtype(dtype):
        raise WireError(f"array {name} has dtype {got_dtype}, expected {np.dtype(dtype)}")
    if got_shape != shape or (fortran and len(shape) > 1):
        raise WireError(f"array {name} has shape {got_shape}, expected {shape}")
    got = sum(map(len, pieces)) - len(start)
    if got != (needed := np.dtype(dtype).itemsize * math.prod(shape)):
        raise WireError(f"array {name} has {got} bytes, expected {needed} for shape {shape}")
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    array = np.frombuffer(data, np.dtype(dtype), offset=len(start)).reshape(shape)
    check_finite({name: array})
    return array


def check_finite(arrays: Mapping[str, Array]) -> None:
    """Raise WireError if an array of floats has a value that is not finite. arrays: by their names in the message."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise WireError(f"array {name} has {np.count_nonzero(~np.isfinite(array))} non-finite values")


def check_variances(buffers: NDArray[np.float32], expected: Expected) -> None:
    """Raise WireError if a variance of BatchNorm is negative. buffers: float32 [b], of an upload of this form."""
    for start, stop in expected.variances:
        if negative := np.count_nonzero(buffers[start:stop] < 0):
            raise WireError(f"array buffers has {negative} negative variances")


def _received(sent: FlowerArray) -> tuple[Sequence[memoryview], bytes]:
    """Return an array's bytes as they came, header included; and the header, without joining the rest."""
    pieces, start = sent.pieces if isinstance(sent, ReceivedArray) else [memoryview(sent.data)], b""
    for piece in pieces:
        start += piece[: 256 - len(start)]
        if len(start) == 256:
            break
    return pieces, start[: 10 + int.from_bytes(start[8:10], "little")]


@functools.lru_cache(maxsize=256)
def _header(start: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return dtype, shape and Fortran order of a header of NumPy's format 1.0.

    Only headers as NumPy writes them are read. NumPy itself reads them with Python's parser, which a stranger's bytes
    should not reach. Before Python 3.11.8 that parser sometimes fails while another thread parses
    (python/cpython#106905). Raises ValueError or TypeError for others.
    """
    found = _HEADER.fullmatch(start[10:].decode("latin1"))
    is_whole = len(start) == 10 + int.from_bytes(start[8:10], "little")
    if start[:8] != b"\x93NUMPY\1\0" or found is None or not is_whole:
        raise ValueError(f"begins with {start!r}")
    dtype, order, shape = found.groups()
    return np.dtype(dtype), tuple(map(int, filter(None, shape.split(",")))), order == "True"
