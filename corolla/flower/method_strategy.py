"""The server's part of a method as a strategy of a user's own app: Flower's FedAvg with the method's downloads and update."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import operator
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from corolla.flower.messages import EXTRAS, HEADER, INITIAL, LOSSES, MODELS, REFUSED, RUN_KEYS, STATISTICS, AppForm
from corolla.flower.training_loop import (
    FACT_KEYS,
    LACKS_FACTS,
    LOOP_FACTS,
    beyond_app,
    computes_with_steps,
    judges_models,
)
from fl_app.config import RunConfig, parse
from fl_app.errors import MethodFault, UserError, listed
from fl_app.keys import Scalar, specs, table_of
from fl_app.known_names import CLIENT_NAME
from fl_app.layout import NO_TENSORS, NOTHING, Model
from fl_app.metrics import MAX_NUMBER
from fl_app.privacy.secure_random import secret
from fl_app.server.record import check_count, known
from fl_app.server.run_folder import RunFolder
from fl_app.transport import wire
from fl_app.transport.flower import (
    ArrayRecord,
    ConfigRecord,
    FedAvg,
    Grid,
    Message,
    MetricRecord,
    RecordDict,
    Result,
)
from strategies import METHOD_PARAMS, METHODS
from strategies.base import AnyMethod, State
from strategies.base.server_half import ServerHalf
from strategies.baselines import components
from strategies.engine.attempt import RoundAttempt, failure_lines
from strategies.engine.plain import PlainRounds
from strategies.engine.streaming import RunningMean

MOD = "app = ClientApp(mods=[personalize])  # from corolla.flower import personalize"
"""The line of a client app that the strategies need."""
_NO_SECAGG = (
    "Flower's secure aggregation is among the mods: it hides single models, and no strategy runs its rounds; `corolla run` has "
    "private runs"
)
_OWN_NETWORK = "trains a network of its own making"
_UNKNOWN = -1
OF_FLOWER = tuple(inspect.signature(FedAvg.__init__).parameters)[1:]
log = logging.getLogger("flwr")


class MethodStrategy(FedAvg):
    """A method of Corolla as a Flower strategy. Its client app needs the mod `personalize`.

    Its arguments are those of Flower's FedAvg, the method's keys and `RUN_KEYS`, with _ for -, and:

    - `classifier`: names or patterns of the classifier's arrays. Default: the last module with a weight of two or more dimensions.
    - `statistics`: those of arrays that are no parameters. Default: BatchNorm's running statistics in PyTorch.
    - `loss_key`: the evaluate function's metric by which some methods judge models.
    - `other_arrays`: the initial arrays of the further models of methods with several.

    Raises UserError for arguments that the method does not have or cannot combine.
    """

    method: ClassVar[str]

    def __init__(
        self,
        *,
        classifier: Sequence[str] = (),
        statistics: Sequence[str] = STATISTICS,
        loss_key: str = "eval_loss",
        other_arrays: Sequence[ArrayRecord] = (),
        **arguments: Any,
    ) -> None:
        if why := beyond(METHODS[self.method]):
            raise beyond_app(self.method, why)
        super().__init__(**{name: arguments.pop(name) for name in OF_FLOWER if name in arguments})
        self.classifier, self.statistics = classifier, statistics
        self.loss_key, self.other_arrays = loss_key, other_arrays
        self.keys = _keys(self.method, arguments)
        self.numbers: dict[int, int] = {}
        self._prefix = f"{secret(4).hex()}/"
        self._with_state: set[int] = set()
        self._loaded: Mapping[str, Any] = {}
        self._rounds = self._before = 0
        self._asked: list[Any] = []
        self._last: tuple[Model, ArrayRecord] | None = None
        self._read: Model | None = None
        self._server: ServerHalf[Any] | None = None
        # rules that hold whatever the federation
        METHODS[self.method].check(config := self._config(2**31, 2**31))
        self._copies = _copies(METHODS[self.method], config, len(other_arrays))
        self._judges = judges_models(METHODS[self.method])
        if self._judges and (ratio := getattr(config.params, "validation_ratio", 0)):
            rule = "must be 0 in an app: the data of its evaluate function judge models"
            raise UserError(key="validation_ratio", rule=rule, value=ratio)
        self._evaluation: tuple[ConfigRecord, float] = ConfigRecord(), 0.0

    # Flower's hooks

    def summary(self) -> None:
        """Log the method and its keys beside what Flower's FedAvg logs."""
        log.info("\t├──> Method: %s %s", self.method, dict(sorted(self.keys.items())) or "")
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds as Flower does. After `load_state_dict` they follow the rounds of that state."""
        if self._server is not None:
            # a second call goes on from the first
            self._loaded, self._server = self.state_dict(), None
        self._rounds = num_rounds
        self._evaluation = evaluate_config or ConfigRecord(), timeout
        self._begin(initial_arrays)
        try:
            return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        finally:
            self._rounds = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes as FedAvg does, and return a message to each with its download."""
        self._meet(grid.get_node_ids())
        messages = self._sorted(super().configure_train(server_round, arrays, config, grid))
        ids = self._meet(message.metadata.dst_node_id for message in messages)
        turn = RoundAttempt(self.config, self._before + server_round, connected=ids, declared=self._declared)
        self.server.begin(turn)
        turn.buffer = self.protocol.open(turn, ids)
        self.turn, self._refused = turn, False
        messages = self._messages(messages, "train")
        return self._judged(messages, server_round, grid) if self._judges else messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Drop bad uploads by name, and let the method make its next state of the others. Without any, nothing changes.

        Return the global model, None if the method has none, and the aggregated metrics. Raises UserError if no node has the mod.
        """
        turn, told, from_mod = self.turn, dict[int, RecordDict](), False
        # in the order of the sums, so that no upload waits for another
        answers = sorted(((self._client_of(message), message) for message in replies), key=operator.itemgetter(0))
        for client_id in set(turn.buffer.ids) - {client_id for client_id, _ in answers}:
            turn.buffer.skip(client_id)
        for client_id, message in answers:
            try:
                upload, metrics = self._uploaded(client_id, message)
                turn.buffer.add(client_id, upload, known(upload.metrics, own=self.server.reports))
                self._with_state.add(client_id)
                # its arrays are in the round's sums or stacks now
                told[client_id] = message.content = metrics
            except MethodFault:
                raise
            except Exception as error:
                from_mod |= wire.RESULT in message.content if message.has_content() else False
                self._drop(client_id, error)
        self._read = None
        log.info("aggregate_train: Received %s results and %s failures", len(told), len(turn.failures))
        if not told:
            if turn.failures and (self._refused or not self.server.state.round):
                advice = (
                    ""
                    if self._refused or from_mod
                    else f"; the client app needs the line {MOD}, with other mods behind personalize"
                )
                told_by = "\n  ".join(failure_lines([turn]))
                raise UserError(
                    f"round {turn.round} has no usable upload{advice}\n  {told_by}",
                    key="client app",
                    rule="usable uploads",
                )
            return None, None
        self.protocol.advance(turn, self.protocol.screen(turn))
        for client_id in (others := _of_other_form(told)):
            log.warning(
                "round %d: client %s has other metrics than most; they do not count", turn.round, turn.called(client_id)
            )
        alike = [told[i] for i in sorted(told.keys() - others)]
        metrics_of_all = self.train_metrics_aggr_fn(alike, self.weighted_by_key)
        shared = self.server.exported()
        return None if shared is None or self._copies else self._record(shared), metrics_of_all

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes as FedAvg does. Each evaluates the model that it would use."""
        messages = self._sorted(super().configure_evaluate(server_round, arrays, config, grid))
        ids = self._meet(message.metadata.dst_node_id for message in messages)
        self.turn = RoundAttempt(self.config, self.server.state.round, connected=ids, declared=self._declared)
        self.server.begin(self.turn)
        return self._messages(messages, "evaluate")

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Aggregate the metrics of the replies, and name the nodes that failed."""
        usable = dict[int, Message]()

        def fail(client_id: int, why: str) -> None:
            self.turn.fail(client_id, "evaluation", "failed", wire.WireError(why))

        for message in sorted(replies, key=lambda message: message.metadata.src_node_id):
            client_id = self._client_of(message)
            if message.has_error() or wire.RESULT in message.content:
                self._with_state.discard(client_id)
                fail(client_id, _error_of(message))
                continue
            try:
                _check_metrics(message.content, self.weighted_by_key)
                usable[client_id] = message
            except wire.WireError as error:
                fail(client_id, str(error))
        for client_id in _of_other_form({client_id: message.content for client_id, message in usable.items()}):
            fail(client_id, "its metrics have other names than those of most replies")
            del usable[client_id]
        counted = [*usable.values()]
        # Flower divides by the weights' sum
        if not any(_only(message.content)[self.weighted_by_key] for message in counted):
            return None
        return super().aggregate_evaluate(server_round, counted)

    # The state

    def state_dict(self) -> dict[str, Any]:
        """Return all that the strategy knows between rounds: plain values and NumPy arrays. What clients keep is not in it."""
        if self._server is None and self._loaded:
            return dict(self._loaded)
        state = self.server.state
        return {
            "method": self.method,
            "round": state.round,
            "prefix": self._prefix,
            "nodes": dict(self.numbers),
            "with-state": sorted(self._with_state),
            "model": {"params": state.model.params, "buffers": state.model.buffers},
            "clients": {client_id: dict(arrays) for client_id, arrays in state.clients.items()},
            "memory": dict(state.memory),
            "screening": self.protocol.saved(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `start` go on from such a state. Raises UserError for that of another method."""
        if state.get("method") != self.method:
            raise UserError(key="state", rule=f"must be of method {self.method}", value=state.get("method"))
        self._loaded, self._server = state, None

    def personal_arrays(self, node_id: int) -> ArrayRecord:
        """Return the model that a node is sent after the last round: the arrays that travel.

        Raises KeyError for a node that the strategy has not met.
        """
        model = self.server.exported(self.numbers[node_id])
        return ArrayRecord() if model is None else self._record(model)

    def models(self) -> list[ArrayRecord]:
        """Return the models of a method that has several, in order. Other methods have none."""
        layout, state = self.server.layout, self.server.state
        own = [layout.take(state.model, components.tensors_of(layout, k)) for k in range(self._copies)]
        return [self.form.record(self.form.layout, model, self.constants) for model in own]

    @property
    def server(self) -> ServerHalf[Any]:
        """The method's server half. Raises UserError before `start`."""
        if self._server is None:
            raise UserError(key=type(self).__name__, rule="it has no state before start()")
        return self._server

    # Its parts

    def _config(self, clients: int, rounds: int) -> RunConfig:
        run: dict[str, Scalar] = {
            "method": self.method,
            "num-clients": clients,
            "num-server-rounds": rounds,
            "min-results": 0.0,
        }
        return parse(run | self.keys, METHOD_PARAMS.of(self.method))

    def _begin(self, arrays: ArrayRecord) -> None:
        """Make the method's server half around the user's arrays, in the state that was loaded."""
        method, state = METHODS[self.method], self._loaded
        self._prefix = state.get("prefix", self._prefix)
        self._last, self.form = None, (form := AppForm.of(arrays, self.statistics, self.classifier))
        self.constants = {name: arrays[name] for name in form.constants}
        self._before = int(state.get("round", 0))
        self.config = self._config(1, self._before + self._rounds)
        initial, layout = self._read_initial(arrays), form.layout
        if self._copies:
            models = [initial, *(self._read_initial(more, "other_arrays") for more in self.other_arrays)]
            if len({model.params.tobytes() for model in models}) < len(models):
                raise UserError(key="other_arrays", rule="must be models that differ, also from initial_arrays")
            layout = components.side_by_side(layout, self._copies)
            initial = Model(*(np.concatenate([getattr(m, part) for m in models]) for part in ("params", "buffers")))
        shared = method.travelling(self.config, layout)
        self._directory = tempfile.TemporaryDirectory(prefix="corolla-")
        folder = RunFolder(Path(self._directory.name), "flower-app")
        self._server = server = method.server(self.config, layout, initial, shared, folder)
        # to compare all uploads takes a stock strategy's time again
        self.protocol = PlainRounds(server, warns=False)
        stays = layout.subset(layout.names - shared)
        self.initial = form.record(stays, layout.take(initial, stays.names), {}) if stays.names else None
        self.run = {
            "keys": {},
            "form": form.to_json(),
            "travels": sorted(shared),
            "arrays": self.arrayrecord_key,
            "weight": self.weighted_by_key,
            "loss": self.loss_key,
            "copies": self._copies,
            "state": self._prefix,
        }
        if state:
            self.numbers, self._with_state = dict(state["nodes"]), set(state["with-state"])
            clients = {int(client_id): dict(arrays) for client_id, arrays in state["clients"].items()}
            model = Model(state["model"]["params"], state["model"]["buffers"])
            if (model.params.size, model.buffers.size) != (server.layout.d, server.layout.b):
                rule = f"must be of a model of {server.layout.d} parameters, as initial_arrays"
                raise UserError(key="state", rule=rule, value=model.params.size)
            server.state = State(model, clients, dict(state["memory"]), self._before)
            self.protocol.restore(state["screening"])

    def _read_initial(self, arrays: ArrayRecord, whose: str = "initial_arrays") -> Model:
        """Return a model of the user's arrays. Raises UserError if they do not fit the form, or are not finite."""
        model = self.form.read(self.form.layout, arrays, whose)
        for slot_name, tensor in self.form.layout.tensors(model).items():
            if not np.isfinite(tensor).all():
                raise UserError(key=f"{whose}: {slot_name}", rule="must be finite as float32")
        return model

    def _judged(self, messages: list[Message], server_round: int, grid: Grid) -> list[Message]:
        """Let the nodes judge the models of their messages by their evaluate functions. Return the messages with the losses.

        Nodes without losses are dropped by name.
        """
        config, timeout = self._evaluation
        config["server-round"] = server_round
        asked = []
        for message in messages:
            content = RecordDict({**message.content, self.configrecord_key: config})
            content[HEADER] = ConfigRecord({**message.content[HEADER], LOSSES: list[float]()})  # type: ignore[dict-item]
            asked.append(Message(content, message.metadata.dst_node_id, "evaluate"))
        self._asked = [message.metadata for message in asked]
        losses = dict[int, list[float]]()
        for reply in grid.send_and_receive(asked, timeout=timeout):
            client_id = self._client_of(reply)
            try:
                losses[client_id] = _losses_in(reply)
            except wire.WireError as error:
                self._drop(client_id, error)
        found = [message for message in messages if self.numbers[message.metadata.dst_node_id] in losses]
        for message in found:
            header: Any = message.content[HEADER]
            header[LOSSES] = losses[self.numbers[message.metadata.dst_node_id]]
        self._asked = [message.metadata for message in found]
        return found

    def _drop(self, client_id: int, error: Exception) -> None:
        """Leave a client out of the round, and name it."""
        self._refused |= isinstance(error, AppRefusal)
        # it may have lost what it kept
        self._with_state.discard(client_id)
        self.turn.buffer.skip(client_id)
        self.turn.fail(client_id, f"round {self.turn.round}", "dropped", error)

    def _meet(self, node_ids: Iterable[int]) -> list[int]:
        """Return the numbers of nodes, sorted. New nodes get the next ones, in the order of their ids."""
        if not self._rounds:
            raise UserError(
                key=type(self).__name__,
                rule="its own start() must run the rounds. A strategy around it, such as Flower's "
                "differential privacy, would change the arrays of single nodes, which it does not see; a "
                "mod inside personalize can",
            )
        nodes = sorted(node_ids)
        for node in nodes:
            self.numbers.setdefault(node, len(self.numbers))
        if len(self.numbers) > self.config.num_clients or not self.run["keys"]:
            self.config = self._config(max(1, len(self.numbers)), self._before + self._rounds)
            self.server.config = self.protocol.config = self.config
            self.run["keys"] = {
                **self.keys,
                "method": self.method,
                "num-clients": self.config.num_clients,
                "num-server-rounds": self.config.num_server_rounds,
            }
            self.header = json.dumps(self.run)
        return sorted(self.numbers[node] for node in nodes)

    @property
    def _declared(self) -> dict[int, dict[str, Scalar]]:
        names = {client_id: f"node {node}" for node, client_id in self.numbers.items()} | {_UNKNOWN: "unknown node"}
        return {client_id: {CLIENT_NAME: name} for client_id, name in names.items()}

    def _client_of(self, message: Message) -> int:
        """Return the number of the client that has sent a reply. An error may come from the SuperLink in its place."""
        said = message.metadata
        if (client_id := self.numbers.get(said.src_node_id)) is not None:
            return client_id
        asked = {metadata.message_id: metadata.dst_node_id for metadata in self._asked}
        return self.numbers.get(asked.get(said.reply_to_message_id, 0), _UNKNOWN)

    @staticmethod
    def _sorted(messages: Iterable[Message]) -> list[Message]:
        """Return messages in the order of their nodes, so that the same nodes give the same sums."""
        return sorted(messages, key=lambda message: message.metadata.dst_node_id)

    def _record(self, model: Model) -> ArrayRecord:
        """Return a model that travels as the user's arrays. Equal models are the same object: they share their bytes."""
        if self._last is None or self._last[0] is not model:
            self._last = model, self.form.record(self.server.layout, model, self.constants)
        return ArrayRecord(dict(self._last[1]))

    def _messages(self, messages: list[Message], task: str) -> list[Message]:
        """Return the messages with each node's download in them. Flower walks through them twice: an iterator would not do."""
        for message in messages:
            client_id = self.numbers[message.metadata.dst_node_id]
            try:
                download = self.server.download_for(client_id, self.turn, task)
            except IndexError:
                node = message.metadata.dst_node_id
                raise UserError(
                    f"method {self.method} is for the nodes that are connected in its first round; node {node} came later",
                    key="nodes",
                    rule="connected in the first round",
                    value=node,
                ) from None
            extras, model = dict(download.extras), download.model
            if self._copies:
                extras |= zip(MODELS, (model.params, model.buffers), strict=True)
            arrays = self.form.record(NO_TENSORS, NOTHING, self.constants) if self._copies else self._record(model)
            content = RecordDict({**message.content, self.arrayrecord_key: arrays})
            content[HEADER] = ConfigRecord({"run": self.header, "round": self.turn.round, "client": client_id})
            if extras:
                content[EXTRAS] = wire.named_record(extras)
            if self.initial is not None and client_id not in self._with_state:
                content[INITIAL] = self.initial
            message.content = content
        # Flower gives them their ids when it sends them
        self._asked = [message.metadata for message in messages]
        return messages

    def _uploaded(self, client_id: int, message: Message) -> tuple[wire.Upload, RecordDict]:
        """Return a reply's upload, checked, and the user's own metrics. Raises WireError to drop it."""
        if message.has_error():
            raise wire.WireError(_error_of(message))
        content = message.content
        if (result := content.get(wire.RESULT)) is None:
            raise wire.WireError(
                f"its reply has no upload of method {self.method}: the client app needs the line {MOD}"
            )
        if REFUSED in result:  # type: ignore[operator]
            raise AppRefusal(_error_of(message))
        expected = self.protocol.expected_from(client_id)
        if isinstance(trained := content.get(self.arrayrecord_key), ArrayRecord) and not self._copies:
            upload = wire.decode_upload(content, dataclasses.replace(expected, d=0, b=0, variances=()))
            upload = dataclasses.replace(upload, model=self._model_in(client_id, trained, expected))
        else:
            upload = wire.decode_upload(content, expected)
        check_count(upload)
        own = RecordDict(
            {n: r for n, r in content.items() if isinstance(r, MetricRecord) and not n.startswith("fitres.")}
        )
        if (said := _check_metrics(own, self.weighted_by_key)) != upload.num_examples:
            raise wire.WireError(
                f"its upload has {upload.num_examples} samples, and its {self.weighted_by_key} is {said:g}"
            )
        return self.protocol.check(client_id, upload), own

    def _place(self, client_id: int) -> Model:
        """Return where the model of a reply is read into: its row of the round's stacks, or for sums a model for all."""
        if not isinstance(self.turn.buffer, RunningMean):
            return self.turn.buffer.row(client_id)
        if self._read is None:
            layout = self.server.layout
            self._read = Model(np.empty(layout.d, np.float32), np.empty(layout.b, np.float32))
        return self._read

    def _model_in(self, client_id: int, arrays: ArrayRecord, expected: wire.Expected) -> Model:
        """Return the trained model of a reply. Raises WireError to drop it."""
        try:
            model = self.form.read(self.server.layout, arrays, "upload", into=self._place(client_id))
        except UserError as error:
            raise wire.WireError(str(error)) from None
        wire.check_finite({"params": model.params, "buffers": model.buffers})
        wire.check_variances(model.buffers, expected)
        return model


def _only(content: RecordDict) -> Any:
    """Return the one MetricRecord of a reply."""
    return next(iter(content.metric_records.values()))


def _check_metrics(content: RecordDict, weight: str) -> float:
    """Return the weight in a reply's metrics. Raises WireError for metrics with which Flower's aggregation would end the run."""
    if (count := len(content.metric_records)) != 1:
        raise wire.WireError(f"a reply must have one MetricRecord, it has {count}")
    value = _only(content).get(weight)
    if not isinstance(value, int | float) or not 0 <= value < MAX_NUMBER:
        raise wire.WireError(f"its metric {weight} must be a number >= 0, got {value!r:.80}")
    return value


def _of_other_form(told: Mapping[int, RecordDict]) -> set[int]:
    """Return the clients whose metrics have other names, or other lengths of lists, than those of most."""
    forms = {
        client_id: tuple(sorted((name, len(v) if isinstance(v, list) else -1) for name, v in _only(content).items()))
        for client_id, content in told.items()
    }
    most = Counter(forms[client_id] for client_id in sorted(forms)).most_common(1)
    return {client_id for client_id, form in forms.items() if form != most[0][0]}


def beyond(method: AnyMethod) -> str:
    """Return what a method declares to need beyond an app of a user's; "" if it is nothing."""
    composed = method.compose and not method.side_by_side
    if method.wrap or composed or (method.submodel and method.submodel.sent):
        return _OWN_NETWORK
    if method.strategy.sample_clients is not ServerHalf.sample_clients:
        return "chooses the clients itself"
    return "needs facts about all clients' data" if method.needs_all else ""


def _copies(method: AnyMethod, config: RunConfig, others: int) -> int:
    """Return the number of models side by side, 0 for methods with one. Raises UserError if it is not one more than `others`."""
    copies = method.side_by_side(config.params) if method.side_by_side else 0
    if method.side_by_side and not copies:
        raise beyond_app(config.method, _OWN_NETWORK)
    if others != (needed := max(0, copies - 1)):
        rule = (
            f"must have the initial arrays of {needed} further models"
            if needed
            else "must not be given: it has one model"
        )
        raise UserError(key="other_arrays", rule=f"method {config.method}: {rule}", value=f"{others} models")
    return copies


def _losses_in(reply: Message) -> list[float]:
    """Return the losses that a client has found. Raises WireError if there are none."""
    if reply.has_error():
        raise wire.WireError(_error_of(reply))
    if (result := reply.content.get(wire.RESULT)) is not None:
        raise (AppRefusal if REFUSED in result else wire.WireError)(_error_of(reply))  # type: ignore[operator]
    header = reply.content.get(HEADER)
    losses: Any = header.get(LOSSES) if isinstance(header, ConfigRecord) else None
    if not isinstance(losses, list) or not all(isinstance(loss, float) for loss in losses):
        raise wire.WireError(f"its reply has no losses of models: the client app needs the line {MOD}")
    return [*losses]


class AppRefusal(wire.WireError):
    """A client's error that every client of the app would have."""


def _error_of(message: Message) -> str:
    """Return why a reply has no result."""
    if message.has_error():
        reason = wire.one_line(message.error.reason)
        return _NO_SECAGG if "secaggplus" in reason else reason
    return wire.error_in(dict(message.content[wire.RESULT]))  # type: ignore[arg-type]


def _keys(method: str, arguments: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return arguments as flat keys of a run. Raises UserError for one that is none, naming the method's."""
    own = {spec.field: spec for spec in specs(METHODS[method].params, table_of(method))}
    if computes_with_steps(METHODS[method]):
        own |= FACT_KEYS
        if lacking := [name for name in LOOP_FACTS if name not in arguments]:
            text = f"method {method} needs the arguments {listed(lacking)} {LACKS_FACTS}, which only `corolla run` knows by itself"
            raise UserError(text, key=listed(lacking), rule=LACKS_FACTS)
    if unknown := [name for name in arguments if name not in own and name not in RUN_KEYS]:
        raise UserError(
            key=listed(unknown),
            rule=f"method {method} has the arguments {listed(sorted(own), most=99) or 'of Flower alone'}",
        )
    return {(own.get(name) or RUN_KEYS[name]).name: value for name, value in arguments.items()}


@functools.cache
def strategy_class(name: str) -> type[MethodStrategy]:
    """Return the class of a method by its paper's name without hyphens. Raises AttributeError for a name that none has."""
    for method in METHODS:
        if method.replace("-", "") == name.lower() and name_of(method) == name:
            break
    else:
        raise AttributeError(
            f"corolla.flower has no {name}; its classes have the papers' names of the methods {', '.join(METHODS)}"
        )
    params = METHODS[method].params
    keys = [
        inspect.Parameter(spec.field, inspect.Parameter.KEYWORD_ONLY, default=spec.default, annotation=spec.type)
        for spec in specs(params)
    ]
    of_flower = inspect.signature(FedAvg.__init__).parameters
    others = [of_flower[each].replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in OF_FLOWER]
    lines = "\n".join(f"- `{spec.field}`: {spec.doc}" for spec in specs(params))
    doc = (
        f"{METHODS.summary(method)}\n\nBeside the arguments of MethodStrategy:\n\n{lines}\n"
        if lines
        else METHODS.summary(method)
    )
    made = type(name, (MethodStrategy,), {"method": method, "__doc__": doc, "__module__": "corolla.flower"})
    made.__signature__ = inspect.Signature([*keys, *others])  # type: ignore[attr-defined]
    return made


def name_of(method: str) -> str:
    """Return the name of a method's class: the first word of its file, without hyphens."""
    word: str = METHODS.summary(method).replace(":", " ").split()[0]
    return word.replace("-", "")
