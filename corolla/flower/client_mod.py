"""The client's part of a method, around the train and evaluate functions of a user's own app: `ClientApp(mods=[personalize])`."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corolla.flower.messages import EXTRAS, HEADER, INITIAL, LOSSES, MODELS, OF_EVERY_RUN, REFUSED, RUN_KEYS, AppForm
from corolla.flower.training_loop import ENDS_RUN, FACT_KEYS, LACKS_LOSS, AppTrainer, Choice, Wishes
from fl_app.config import RunConfig, parse
from fl_app.errors import UserError, describe, listed
from fl_app.keys import Scalar, specs, table_of
from fl_app.layout import NOTHING, Layout, Model
from fl_app.transport import wire
from fl_app.transport.flower import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from strategies import METHOD_PARAMS, METHODS
from strategies.base import LocalUpdate, RoundContext
from strategies.baselines import components

log = logging.getLogger("flwr")

App = Callable[[Message, Context], Message]
_UNKNOWN = -1
# the initial values of the tensors that stay, among a client's arrays
_FIRST = "first.params", "first.buffers"


@dataclass
class AppState:
    """What a client keeps of a strategy between its rounds, in Flower's `context.state`. prefix: of the strategy's arrays there."""

    prefix: str = ""
    arrays: MutableMapping[str, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, context: Context, prefix: str) -> AppState:
        """Return the state of the client whose context this is."""
        record: Any = context.state.get(HEADER, {})
        return cls(
            prefix, {name[len(prefix) :]: array.numpy() for name, array in record.items() if name.startswith(prefix)}
        )

    def keep(self, context: Context) -> None:
        """Store the state. It replaces the state before, but not those of other strategies."""
        record: Any = context.state.get(HEADER, {})
        others = {name: array for name, array in record.items() if not name.startswith(self.prefix)}
        own = {self.prefix + name: np.asarray(array) for name, array in self.arrays.items()}
        context.state[HEADER] = ArrayRecord({**others, **wire.named_record(own)})


@functools.lru_cache(maxsize=4)
def _run(text: str) -> tuple[Any, Any, AppForm, frozenset[str], Mapping[str, Any]]:
    """Return what all messages of a run say: config, method, form, what travels; and the rest, among it the records' keys."""
    said = json.loads(text)
    config, form = _config(dict(said["keys"])), AppForm.from_json(said["form"])
    return config, METHODS[config.method], form, frozenset(said["travels"]), said


def _config(keys: Mapping[str, Scalar]) -> RunConfig:
    """Return the configuration in a message. Raises UserError for a method or a key that no strategy sends.

    A server may send anything, and no listed application must import a module of its site, or open a file, for that.
    """
    method = str(keys.get("method"))
    if method not in [*METHODS]:
        raise UserError(key="method", rule="must be one of Corolla's in a message to an app", value=method)
    own = specs(METHODS[method].params, table_of(method))
    known = {*OF_EVERY_RUN, *(spec.name for spec in (*RUN_KEYS.values(), *FACT_KEYS.values(), *own))}
    if strange := sorted(keys.keys() - known):
        raise UserError(key=strange[0], rule="must not be in a message to an app")
    return parse(keys, METHOD_PARAMS.of(method))


def personalize(message: Message, context: Context, call_next: App) -> Message:
    """Do a method's part of a client's round around the user's own train and evaluate functions.

    They see the message that Flower's FedAvg would send, with the model that the method trains or evaluates. Messages of other
    strategies pass unchanged.
    """
    if HEADER not in message.content:
        return call_next(message, context)

    def app(message: Message, context: Context) -> Message:
        try:
            return call_next(message, context)
        except Exception as error:
            own.append(error)
            raise

    own: list[Exception] = []
    try:
        return ClientTurn(message, context, app).answer()
    except Exception as error:
        if error in own:
            raise
        log.error("corolla: %s", error, exc_info=None if isinstance(error, UserError) else error)
        told = {wire.ERROR: str(error) if isinstance(error, UserError) else describe(error)}
        ends = isinstance(error, UserError) and error.rule in ENDS_RUN
        return Message(wire.fit_reply({}, 0, told | ({REFUSED: True} if ends else {})), reply_to=message)


class AppContext(RoundContext[Any]):
    """The context of a client half in an app. The number of samples is known once the app has replied."""

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute. Raises UserError for a number of samples that is not known."""
        value = super().__getattribute__(name)
        if name == "num_samples" and value == _UNKNOWN:
            raise self.trainer.refusal("the number of samples before training")  # type: ignore[attr-defined]
        return value


class ClientTurn:
    """One message's turn on a client."""

    def __init__(self, message: Message, context: Context, call_next: App) -> None:
        self.message, self.context, self.call_next = message, context, call_next
        content = message.content
        header: Any = content.pop(HEADER)
        self.config, method, self.form, shared, run = _run(str(header["run"]))
        self.key, self.weight, self.loss = run["arrays"], run["weight"], run["loss"]
        self.trains = message.metadata.message_type.partition(".")[0] == "train"
        # a message that only asks for the losses by which the next one's model is made; the losses so far
        self.judges, self.losses = LOSSES in header and not self.trains, list[float]()
        self.told: Iterator[float] = iter(header[LOSSES] if self.trains and LOSSES in header else ())
        self.copies: int = run["copies"]
        self.choice = Choice()
        one = self.form.layout
        self.layout: Layout = components.side_by_side(one, self.copies) if self.copies else one
        self.update: LocalUpdate[Any] = method.local_update()
        self.state = AppState.of(context, run["state"])
        extras: Any = content.pop(EXTRAS, {})
        initial: Any = content.pop(INITIAL, None)
        sent: Any = content[self.key]
        self.sent = sent
        travelling = self.layout.subset(shared)
        self.constants = {name: sent[name] for name in self.form.constants if name in sent}
        self.received = NOTHING
        if self.copies:
            self.received = Model(*(extras[name].numpy() for name in MODELS))
        elif travelling.names and travelling.names <= set(sent):
            self.received = self.form.read(travelling, sent, "download")
        self.stays = self.layout.subset(self.layout.names - shared)
        if initial is not None and _FIRST[0] not in self.state.arrays:
            first = self.form.read(self.stays, initial, "download")
            self.state.arrays.update(zip(_FIRST, (first.params, first.buffers), strict=True))
        # the records that the user's functions are given besides the arrays
        self.given = {name: record for name, record in content.items() if name != self.key}
        self.reply: Message | None = None
        # the last model that the user's function has returned, and its arrays
        self.trained = NOTHING, ArrayRecord()
        module = self.choice if self.copies else None
        self.trainer = AppTrainer(self.config, int(header["round"]), self._train, self._loss_of, module)
        self.ctx = AppContext(
            config=self.config,
            params=self.config.params,
            round=int(header["round"]),
            client_id=int(header["client"]),
            layout=self.layout,
            shared=shared,
            initial=self._initial,
            trainer=self.trainer,
            num_samples=_UNKNOWN,
            extras={name: array.numpy() for name, array in extras.items() if name not in MODELS},
        )

    def answer(self) -> Message:
        """Do what the message asks, and return the reply."""
        if self.trains:
            return self.train()
        return self.judge() if self.judges else self.evaluate()

    def train(self) -> Message:
        """Merge, let the user's function train, and reply with the upload."""
        update, state, ctx = self.update, self.state, self.ctx
        start = update.merge(self.received, state, ctx)
        trained = update.train(start, state, ctx)
        reply = self.reply
        if reply is None:
            raise UserError(key=f"method {self.config.method}", rule="it has not trained")
        if reply.has_error():
            return reply
        ctx = dataclasses.replace(ctx, num_samples=self.num_samples)
        update.keep_local(trained, state, ctx)
        upload = update.upload(start, trained, state, ctx)
        if state.arrays:
            try:
                wire.check_finite({"params": upload.model.params, "buffers": upload.model.buffers, **upload.extras})
            except wire.WireError as error:
                raise UserError(f"the trained model: {error}") from None
            # only now: a round that failed must leave no trace
            state.keep(self.context)
        records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
            name: record for name, record in reply.content.items() if not isinstance(record, ArrayRecord)
        }
        if upload.model is self.trained[0] and not self.copies:
            upload = dataclasses.replace(upload, model=NOTHING)
            records[self.key] = self.trained[1]
        reply.content = RecordDict({**records, **wire.encode_upload(upload)})
        return reply

    def judge(self) -> Message:
        """Reply with the losses that the method asks for before it trains."""
        self.update.merge(self.received, self.state, self.ctx)
        return Message(RecordDict({HEADER: ConfigRecord({LOSSES: self.losses})}), reply_to=self.message)

    def evaluate(self) -> Message:
        """Let the user's function evaluate the model that the client would use."""
        start = self.update.merge(self.received, self.state, self.ctx)
        return self._call(self.update.personal(start, self.state, self.ctx))

    @property
    def num_samples(self) -> int:
        """The number of training samples that the user's function has reported."""
        assert self.reply is not None
        records = (record for record in self.reply.content.values() if isinstance(record, MetricRecord))
        found = next((record[self.weight] for record in records if self.weight in record), None)
        if isinstance(found, int | float) and abs(found) < 2**53:
            return int(found)
        rule = f"must have a MetricRecord with {self.weight!r}, the number of training samples"
        raise UserError(key="reply", rule=rule, value=found)

    def _call(self, model: Model) -> Message:
        """Call the user's function with a model, and return its reply."""
        # where nothing stays on the client, a method may train from just what was sent
        unchanged = model is self.received and not self.stays.names and not self.copies
        if self.copies:
            model = self.layout.take(model, self._chosen)
        arrays = (
            ArrayRecord(dict(self.sent)) if unchanged else self.form.record(self.form.layout, model, self.constants)
        )
        # the function may change what it is given, and a method may call it twice
        given = {
            name: ConfigRecord(dict(record)) if isinstance(record, ConfigRecord) else record
            for name, record in self.given.items()
        }
        self.message.content = RecordDict({self.key: arrays, **given})
        return self.call_next(self.message, self.context)

    def _train(self, start: Model, wishes: Wishes) -> Model:
        """Return the model that the user's function makes of another one. After its error: the same model."""
        wishes.names = [slot.name for slot in self.form.layout.params]
        if self.copies:
            # the user's function sees none of the others
            wishes.frozen &= self._chosen
        with wishes.told():
            reply = self.reply = self._call(start)
        if reply.has_error():
            return start
        wishes.check(self.config.method)
        records = [record for record in reply.content.values() if isinstance(record, ArrayRecord)]
        own = reply.content[self.key] if self.key in reply.content else records[0] if len(records) == 1 else None
        if not isinstance(own, ArrayRecord):
            raise UserError(
                key="reply", rule=f"must have an ArrayRecord {self.key!r}", value=listed(list(reply.content))
            )
        model = self.form.read(self.form.layout, own, "reply")
        self.trained = (
            model,
            ArrayRecord({name: own[name] for name in self.form.dtypes if name in self.form.layout.names}),
        )
        return self.layout.put(start, model, self._chosen) if self.copies else model

    def _loss_of(self, model: Model) -> float:
        """Return the loss that the user's evaluate function finds of a model. To train, the message before it has found it."""
        if self.trains:
            if (told := next(self.told, None)) is None:
                raise UserError(key="losses", rule="must come with the message, one for each model to judge")
            return float(told)
        reply = self._call(model)
        if reply.has_error():
            raise UserError(f"the app's evaluate function: {wire.one_line(reply.error.reason)}")
        records = (record for record in reply.content.values() if isinstance(record, MetricRecord))
        loss = next((record[self.loss] for record in records if self.loss in record), None)
        if not isinstance(loss, int | float):
            text = (
                f"method {self.config.method}: the evaluate function's MetricRecord must have {self.loss!r}, the mean loss "
                "(argument loss_key)"
            )
            raise UserError(text, key=self.loss, rule=LACKS_LOSS, value=loss)
        self.losses.append(float(loss))
        return float(loss)

    @property
    def _chosen(self) -> frozenset[str]:
        """The names of the tensors of the chosen one of the models side by side."""
        return components.tensors_of(self.layout, self.choice.chosen)

    def _initial(self) -> Model:
        """Return a model with the initial values of the tensors that stay. The others are zero: they are always sent."""
        if self.stays.names and _FIRST[0] not in self.state.arrays:
            raise UserError(
                "this client's state is lost (a SuperNode keeps it in memory); the strategy sends its first model again"
            )
        base = Model(np.zeros(self.layout.d, np.float32), np.zeros(self.layout.b, np.float32))
        if not self.stays.names:
            return base
        first = Model(*(self.state.arrays[name] for name in _FIRST))
        return self.layout.put(base, first, self.stays.names)
