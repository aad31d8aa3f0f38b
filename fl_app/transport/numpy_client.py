"""A NumPyClient that answers whole messages."""

from __future__ import annotations

from flwr.app import RecordDict
from flwr.compat.client.client import Client as Client
from flwr.compat.client.numpy_client import NumPyClient
from flwr.compat.common import recorddict_compat as compat
from flwr.compat.common.parameter import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.typing import Config, EvaluateIns, FitIns, GetPropertiesIns, NDArrays

from fl_app.transport.outgoing import Kind


class MessageClient(NumPyClient):
    """A client whose `reply` makes one message of another. Flower's own apps call the functions of a NumPyClient, which use it."""

    def reply(self, kind: Kind, content: RecordDict) -> RecordDict:
        """Return the content of the reply to a message's content."""
        raise NotImplementedError

    def get_properties(self, config: Config) -> Config:
        """Return the client's properties, or its answer to a question of a private round."""
        asked = compat.getpropertiesins_to_recorddict(GetPropertiesIns(config))
        return {**compat.recorddict_to_getpropertiesres(self.reply("properties", asked)).properties}

    def fit(self, parameters: NDArrays, config: Config) -> tuple[NDArrays, int, Config]:
        """Return an upload's arrays, the number of training samples, and metrics. The arguments are those of a download."""
        sent = FitIns(ndarrays_to_parameters(parameters), config)
        got = compat.recorddict_to_fitres(self.reply("fit", compat.fitins_to_recorddict(sent, True)), True)
        return parameters_to_ndarrays(got.parameters), got.num_examples, {**got.metrics}

    def evaluate(self, parameters: NDArrays, config: Config) -> tuple[float, int, Config]:
        """Return the loss, the number of test samples, and metrics. The arguments are those of a download."""
        sent = EvaluateIns(ndarrays_to_parameters(parameters), config)
        got = compat.recorddict_to_evaluateres(self.reply("evaluate", compat.evaluateins_to_recorddict(sent, True)))
        return got.loss, got.num_examples, {**got.metrics}
