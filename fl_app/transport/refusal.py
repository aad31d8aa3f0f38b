"""A client's answer if it takes no part, in the format of fl_app/transport/wire.py, made without any of the run's code."""

from __future__ import annotations

from flwr.app import RecordDict

from fl_app.keys import Scalar
from fl_app.known_names import CLIENT_NAME
from fl_app.reasons import Reason
from fl_app.transport.outgoing import Kind
from fl_app.transport.wire import DETAILS, ERROR, evaluate_reply, fit_reply, properties_reply


def encode(kind: Kind, client_id: int | None, reason: Reason, details: str, name: str = "") -> RecordDict:
    """Return the reply to a message of this kind, with the reason why the client takes no part, and its text.

    client_id: None if the node has none. name: the client's, "" if it has none.
    """
    entries: dict[str, Scalar] = {ERROR: str(reason), DETAILS: details}
    if kind == "properties":
        who: dict[str, Scalar] = {} if client_id is None else {"client-id": client_id}
        return properties_reply({**entries, **who, **({CLIENT_NAME: name} if name else {})})
    return fit_reply([], 0, entries) if kind == "fit" else evaluate_reply(0.0, 0, entries)
