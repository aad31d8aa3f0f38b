"""A client's answer if it takes no part, in the format of fl_app/wire.py, made without any of the run's code."""

from __future__ import annotations

from flwr.app import RecordDict
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.typing import Code, EvaluateRes, FitRes, GetPropertiesRes, Parameters, Scalar, Status

from fl_app.outgoing import Kind
from fl_app.reasons import Reason
from fl_app.wire import DETAILS, ERROR


def encode(kind: Kind, client_id: int | None, reason: Reason, details: str) -> RecordDict:
    """Return the reply to a message of this kind, with the reason why the client takes no part, and its text.

    client_id: None if the node has none.
    """
    status = Status(Code.OK, "Success")
    entries: dict[str, Scalar] = {ERROR: str(reason), DETAILS: details}
    if kind == "properties":
        if client_id is not None:
            entries["client-id"] = client_id
        return compat.getpropertiesres_to_recorddict(GetPropertiesRes(status, entries))
    if kind == "fit":
        nothing = Parameters([], "numpy.ndarray")
        return compat.fitres_to_recorddict(FitRes(status, nothing, 0, entries), keep_input=False)
    return compat.evaluateres_to_recorddict(EvaluateRes(status, 0.0, 0, entries))
