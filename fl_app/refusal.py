"""A client's answer if its site refuses, in the format of fl_app/wire.py, made without any of the run's code."""

from __future__ import annotations

from flwr.app import RecordDict
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.typing import Code, EvaluateRes, FitRes, GetPropertiesRes, Parameters, Status

from fl_app.wire import ERROR


def encode(kind: str, client_id: int, why: str) -> RecordDict | None:
    """Return the reply to a message of this kind, with the reason why the client takes no part.

    None for a kind that no server of Corolla's sends.
    """
    status = Status(Code.OK, "")
    match kind:
        case "get_properties":
            return compat.getpropertiesres_to_recorddict(GetPropertiesRes(status, {"client-id": client_id, ERROR: why}))
        case "train":
            nothing = Parameters([], "numpy.ndarray")
            return compat.fitres_to_recorddict(FitRes(status, nothing, 0, {ERROR: why}), keep_input=False)
        case "evaluate":
            return compat.evaluateres_to_recorddict(EvaluateRes(status, 0.0, 0, {ERROR: why}))
    return None
