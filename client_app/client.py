"""The only NumPyClient: one download in, merge, evaluate, train, evaluate, upload; every method is a LocalUpdate inside it."""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.compat.client.numpy_client import NumPyClient
from flwr.compat.common.typing import Config, NDArrays

from client_app.notes import Notes, OwnData, spent_on
from client_app.session import Session
from client_app.state import State, StateStore, state_root
from fl_app import extras, tasks, trainable_tensors, wire
from fl_app.checksums import HASHES
from fl_app.config import RunConfig
from fl_app.data import ClientData, data_root
from fl_app.errors import Diverged, UserError, describe, diverged
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.metrics import EPSILON, FINETUNED, LOSS, MAX_NUMBER, moments, range_error
from fl_app.server.properties import NORMALIZATION
from fl_app.site import refuse_within_site, site_directory
from fl_app.sources import NODE, source_of
from fl_app.wire import FEATURE_TAGS, FEATURES, Download, Upload
from strategies.base import RoundContext

if TYPE_CHECKING:
    from client_app.private import Masker
    from client_app.trainer import LocalTrainer

log = logging.getLogger("corolla")

# training on a client's own data does not lead to such a loss, and does not come back from it
DIVERGED_LOSS = 1e4
# of inputs or targets: a standardised one is hardly ever this large
FAR = 30.0
# of images; of what has more, one client tells mean and deviation
MOST_CHANNELS = 16


class CorollaClient(NumPyClient):
    """One client of a run. Failures are reported to the server by name instead of raised."""

    def __init__(self, session: Session, client_id: int, data_path: str, keys: str = "", run: int = 0) -> None:
        self.session, self.config, self.method = session, session.config, session.method
        self.client_id, self.data_path, self.keys, self.run = client_id, data_path, keys, run
        self._seconds: dict[str, float] = {}
        # Metrics that name the state used, where the one the server named is damaged.
        self._fallback: dict[str, Scalar] = {}

    # Messages

    def get_properties(self, config: Config) -> Config:
        """Return this client's id and the properties of its data, or why it cannot take part. Does not import torch on a CPU.

        This is asked once, when a run starts. The first client of a process looks whether files of the data were overwritten.
        """
        try:
            return self._properties()
        except Exception as error:
            log.debug("properties", exc_info=True)
            return {"client-id": self.client_id, wire.ERROR: reason(error)}

    def fit(self, parameters: NDArrays, config: Config) -> tuple[NDArrays, int, Config]:
        """Train one round ("train"), hand out the personal model ("collect") or remove what is kept of a run ("forget")."""
        try:
            download = wire.decode_download(parameters, config)
            answer = {"collect": self._collect, "forget": self._forget}.get(download.task, self._train)
            arrays, num_examples, metrics = wire.encode_upload(answer(download))
            return arrays, num_examples, dict(metrics)
        except Exception as error:
            log.exception("client %d failed", self.client_id)
            return [], 0, {wire.ERROR: reason(error)}

    def evaluate(self, parameters: NDArrays, config: Config) -> tuple[float, int, Config]:
        """Evaluate the personalized model; with finetune-epochs also after so many more local epochs."""
        try:
            metrics = self._evaluate(wire.decode_download(parameters, config))
            return float(metrics.pop("loss")), self._reported_count(len(self.data.y_test)), dict(metrics)
        except Exception as error:
            log.exception("client %d failed", self.client_id)
            return 0.0, 0, {wire.ERROR: reason(error)}

    # A client's turn in a round

    def _train(self, download: Download) -> Upload:
        update = self.method.local_update()
        with self._timed("prepare"):
            ctx, state, trainer = self._prepare(download)
            masker = self._claim_attempt(download)
        with self._timed("merge"):
            start = update.merge(download.model, state, ctx)
        with self._timed("evaluate"):
            loss_before, metric_before = trainer.evaluate(update.personal(start, state, ctx))
        with self._timed("train"):
            try:
                trained = update.train(start, state, ctx)
            except UserError as error:
                raise self._training_error(error, loss_before) from None
        train_loss = trainer.last_loss
        update.keep_local(trained, state, ctx)
        with self._timed("evaluate"):
            loss_after, metric_after = trainer.evaluate(update.personal(trained, state, ctx))
        name_before, name_after = moments(trainer.headline.name)
        measured = {
            name_before: metric_before,
            name_after: metric_after,
            "loss": train_loss,
            "loss-before": loss_before,
            "loss-after": loss_after,
        }
        reported = self._reported(measured, trainer)
        with self._timed("score"):
            upload = update.upload(start, trained, state, ctx)
            if masker:
                upload = masker.mask(upload)
        with self._timed("state"):
            version = self._save(state, download)
        metrics: dict[str, Scalar] = {
            **reported,
            "test-samples": self._reported_count(len(self.data.y_test)),
            wire.STATE_VERSION: version,
        }
        if self.config.dp_epsilon:
            metrics |= {EPSILON: trainer.epsilon, "dp-noise": trainer.plan.noise}
        metrics |= self._fallback
        metrics |= {f"seconds-{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics |= self._own(upload.metrics, trainer)
        metrics |= self._failed_metrics(trainer)
        return Upload(upload.model, upload.mask, upload.extras, metrics, self._reported_count(ctx.num_samples))

    # Other tasks

    def _properties(self) -> Config:
        self.session.prepare_changed_data(self.data_path)
        if self.config.device.startswith("cuda"):
            from client_app.device_model import resolve_device

            resolve_device(self.config.device)
        tasks.require_packages(self.config)
        if self.config.dp_epsilon:
            extras.require("opacus", "dp-epsilon")
            from client_app.dp import Plan, Spent, check_module

            self.session.check_once(check_module, self.data.info)
            # what a resumed run has spent itself is not told from others' here
            own = None if self.keys == wire.SEED_KEYS or self.config.resume else self._own_data()
            before = Spent.of(spent_on(site_directory(), own) if own else [])
            Plan.of(self.config, len(self.data.y_train), self.method.dp_epochs_of(self.config), before)
        properties: Config = {
            "client-id": self.client_id,
            "num-clients": self.config.num_clients,
            "train-samples": self._reported_count(len(self.data.y_train)),
            "test-samples": self._reported_count(len(self.data.y_test)),
            **data_properties(self.data, self.config),
            **self._data_hashes(),
        }
        own_data = self.config.dataset == NODE
        if own_data and not self.config.private:
            properties[FEATURES] = json.dumps(self.data.info.facts.features)
        if self.config.private:
            from client_app import private
            from fl_app.privacy.keyring import open_keyring

            keys = open_keyring(self.keys, self.config.seed, self.client_id, self.config.num_clients)
            properties |= private.properties(keys)
            if own_data:
                info = self.data.info
                properties[FEATURE_TAGS] = private.tags(keys, json.dumps([info.facts.features, info.classes]))
        return properties

    def _data_hashes(self) -> Config:
        """Return what tells the data from others, and what inputs are shifted and scaled by where no client may hide it."""
        hashes = self.session.told_hashes(self.data_path)
        if hashes is None:
            return {}
        found: Config = dict(zip(HASHES, hashes, strict=True))
        info = self.data.info
        # one client's will do where there are many features
        if hashes.partition and (self.client_id == 0 or len(info.mean) <= MOST_CHANNELS):
            found[NORMALIZATION] = json.dumps(info.scaling)
        return found

    def _evaluate(self, download: Download) -> dict[str, Scalar]:
        ctx, state, trainer = self._prepare(download)
        update = self.method.local_update()
        start = update.merge(download.model, state, ctx)
        model = update.personal(start, state, ctx)
        names = [metric.name for metric in tasks.measured(self.config)]
        loss, measured = trainer.measure(model, names)
        if self.config.finetune_epochs:
            trainer.begin_finetuning()
            tuned = update.finetune(model, state, ctx, self.config.finetune_epochs)
            _, tuned_measured = trainer.measure(tuned, names)
            measured = measured | {f"{name}{FINETUNED}": value for name, value in tuned_measured.items()}
        exported = update.export(model, state, ctx)
        return {
            **self._reported({"loss": loss, **measured}, trainer),
            **wire.hashes(exported),
            **self._fallback,
            **self._failed_metrics(trainer),
        }

    def _collect(self, download: Download) -> Upload:
        if self.config.private:
            raise UserError("private: this client hands out no model of its own")
        ctx, state, _ = self._prepare(download)
        update = self.method.local_update()
        start = update.merge(download.model, state, ctx)
        model = update.export(update.personal(start, state, ctx), state, ctx)
        return Upload(model, metrics=self._fallback, num_examples=ctx.num_samples, dtype=wire.WHOLE)

    def _forget(self, download: Download) -> Upload:
        self._open_store(download)
        self._store.forget()
        self._notes.forget()
        return Upload(download.model)

    # What a task works with: data, state, the model in a trainer

    @cached_property
    def data(self) -> ClientData:
        """This client's part of the data."""
        return self.session.data(self.client_id, self.data_path)

    def _prepare(self, download: Download) -> tuple[RoundContext[Any], State, Any]:
        """Load the state, build the run's model, and return the context of the method's client half, the state and the trainer.

        Raises UserError if the download is not of the model that is here, or if the state was trained without a budget.
        """
        from client_app.process import prepare_training

        prepare_training(self.config.client_threads)
        from client_app.trainer import LocalTrainer

        config, method = self.config, self.method
        self._open_store(download)
        state = self._store.load(download.state_version)
        if state.version != download.state_version:
            self._fallback = {wire.STATE_USED: state.version}
        # With `train` or `share`, tensors that never travel start from the file too, and the server sends them to nobody.
        weights_file = config.initial_weights if config.train or config.share else ""
        module, facts = self.session.network(self.data.info, weights_file)
        check_same_model(download, facts.layout, facts.shared_layout, config.model)

        @functools.cache
        def initial() -> Model:
            start = facts.initial
            if config.initial_weights and not weights_file and method.local_update.local_from_file:
                start = self.session.network(self.data.info, config.initial_weights)[1].initial
            # the method may write into it
            return Model(start.params.copy(), start.buffers.copy())

        trainer = LocalTrainer(module, config, self.data, download.round, self.client_id)
        ctx = RoundContext(
            config=config,
            params=config.params,
            round=download.round,
            client_id=self.client_id,
            layout=facts.layout,
            shared=facts.shared,
            initial=initial,
            trainer=self._with_budget(trainer) if config.dp_epsilon else trainer,
            num_samples=len(self.data.y_train),
            extras=download.extras,
        )
        return ctx, state, ctx.trainer

    def _open_store(self, download: Download) -> None:
        """Open the client's state of an experiment, and what its site has noted of it. Raises UserError."""
        config, simulated = self.config, self.keys == wire.SEED_KEYS
        self._store = StateStore(state_root(config.state_dir), download.experiment, self.client_id)
        # what the machine says itself its SuperNode has checked when it started
        if config.state_dir:
            refuse_within_site("state-dir", self._store.directory)
        if config.data_dir:
            refuse_within_site("data-dir", data_root(config))
        if config.dp_epsilon or config.private:
            self._store.refuse_earlier_notes()
        own = self._own_data() if config.dp_epsilon else None
        self._notes = Notes(site_directory(), download.experiment, self.client_id, self.run, simulated, own)

    def _own_data(self) -> OwnData | None:
        """Return which of the site's own data this client trains on, None if it has none."""

        def partition() -> str:
            return ":".join(self.session.hashes(self.data_path))

        return OwnData.of(self.config, self.data_path, self.client_id, partition)

    def _with_budget(self, trainer: LocalTrainer) -> Any:
        """Return a trainer that looks at records by noisy steps alone, within the budget of this client's records."""
        # Opacus takes seconds to import
        from client_app.dp import Budget, NoisyTrainer

        budget = Budget(self._notes, self.config, self._store.directory)
        budget.check_state()
        return NoisyTrainer(trainer, budget=budget, epochs=self.method.dp_epochs_of(self.config))

    def _claim_attempt(self, download: Download) -> Masker | None:
        """Claim the attempt of a private round; raises UserError if it must not be answered."""
        if not self.config.private:
            return None
        from client_app import private
        from fl_app.privacy.keyring import open_keyring

        keyring = open_keyring(self.keys, self.config.seed, self.client_id, self.config.num_clients)
        masker = private.Masker.of(download, self.config, keyring)
        self._notes.claim(wire.state_version(download.round, download.attempt))
        return masker

    def _save(self, state: State, download: Download) -> str:
        # a repetition of this round would start from it again
        read_from = state.version
        version = self._store.save(state, download.round, download.attempt)
        self._store.delete_before(read_from, download.keep)
        return version

    # What the server gets to know

    def _reported(self, measured: Mapping[str, float], trainer: Any) -> dict[str, Scalar]:
        """Return losses and metrics as the server gets them: all NaN with `report-accuracy = false`.

        Raises UserError if they show that training diverged.
        """
        if not self.config.report_accuracy:
            return dict.fromkeys(measured, math.nan)
        if name := diverged_metric(measured):
            error = diverged(name, measured[name], trainer.learning_rate)
            raise UserError(f"{error}{self._far_values()}")
        return {name: LOSS.clipped(value) if name.startswith(LOSS.name) else value for name, value in measured.items()}

    def _own(self, reported: Mapping[str, Scalar], trainer: Any) -> dict[str, Scalar]:
        """Return a method's own metrics clipped to their ranges; NaN for one beyond its range, and the trainer notes why."""
        own = dict(reported)
        for metric in self.method.reports:
            if not isinstance(value := own.get(metric.name), float):
                continue
            own[metric.name] = value = metric.clipped(value)
            if error := range_error(metric.name, value, *metric.range):
                own[metric.name], trainer.metric_errors[metric.name] = math.nan, error
        return own

    def _failed_metrics(self, trainer: Any) -> dict[str, Scalar]:
        """Return what the server is told of metrics that could not be had: nothing if it gets none."""
        errors = trainer.metric_errors if self.config.report_accuracy else {}
        return {wire.METRIC_ERRORS: "; ".join(f"{name}: {error}" for name, error in errors.items())} if errors else {}

    @cached_property
    def _reports_counts(self) -> bool:
        return self.method.reports_counts(self.config)

    def _reported_count(self, samples: int) -> int:
        """Return a number of samples as the server gets it: 1 where it need not know."""
        return samples if self._reports_counts else 1

    def _training_error(self, error: UserError, loss_before: float) -> UserError:
        """Return the error of a training, which names the model the client was sent if that was lost already."""
        may_tell = self.config.report_accuracy and len(self.data.y_test) > 0
        if may_tell and isinstance(error, Diverged):
            error = UserError(f"{error}{self._far_values()}")
        if not may_tell or loss_before < DIVERGED_LOSS:
            return error
        return UserError(f"{error}; the model it was sent had a loss of {loss_before:.3g} already")

    def _far_values(self) -> str:
        """Say how far from 1 the data are that training diverged on, and what to do; empty if they are near, or not to be told."""
        if self.config.private or self.config.dp_epsilon:
            return ""
        return "".join(f"; {line}" for line in far_values(self.data, self.config))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started


def far_values(data: ClientData, config: RunConfig) -> list[str]:
    """Say which of the inputs and targets of training are far from 1: a learning rate that suits others is too large for them."""
    lines = []
    scaled = config.normalize == "mean-std" or data.x_train.dtype.kind != "f"
    for name, values, advice in (
        ("inputs", data.x_train, 'normalize = "mean-std" scales them'),
        ("targets", data.y_train, "scale them, or lower the learning rate"),
    ):
        if values.dtype.kind == "f" and values.size and not (name == "inputs" and scaled):
            low, high = float(values.min()), float(values.max())
            if max(abs(low), abs(high)) > FAR:
                lines.append(f"{name} are in {low:.4g} .. {high:.4g}: {advice}")
    return lines


def check_same_model(download: Download, layout: Layout, received: Layout, model: str) -> None:
    """Raise UserError if a download is not of this client's model. layout: of the model. received: of its tensors that travel."""
    theirs = str(download.method.get(trainable_tensors.HASH, ""))
    if layout.constants != theirs:
        raise UserError(
            f"train: the tensors of model {model} that do not train are not the server's (sha256 "
            f"{layout.constants[:12] or 'of none'}, the server's {theirs[:12] or 'of none'}); every node needs the same file"
        )
    params, buffers = download.model.params.size, download.model.buffers.size
    if download.model.nbytes and (params, buffers) != (received.d, received.b):
        raise UserError(
            f"received {params} parameters and {buffers} buffer elements, this "
            f"client's model {model} shares {received.d} and {received.b}: is it the server's model?"
        )


def data_properties(data: ClientData, config: RunConfig) -> Config:
    """Return the properties of a client's data that the server gets: their shape, and their classes where it may."""
    info = data.info
    properties: Config = {
        "in-channels": info.in_channels,
        "image-size": info.image_size,
        "num-classes": info.num_classes,
    }
    # Samples that are no square images.
    if info.shape:
        properties["input-shape"] = ",".join(map(str, info.shape))
    # Whoever reads a model's outputs needs the names.
    if config.report_class_counts or source_of(config.dataset).tells_classes:
        properties["class-names"] = json.dumps(info.classes)
    if config.report_class_counts and not config.private and not config.dp_epsilon and tasks.of(config).has_classes:
        counts = np.bincount(data.y_train, minlength=info.num_classes)
        properties["class-counts"] = ",".join(map(str, counts))
    return properties


def diverged_metric(measured: Mapping[str, float]) -> str:
    """Return the name of a loss or metric that shows that training diverged, "" if none does.

    That is one larger than the server takes, or a loss after training that is infinite, or NaN where it was a number before.
    """
    for name, value in measured.items():
        if MAX_NUMBER < abs(value) < math.inf:
            return name
    before, after = measured.get("loss-before", 0.0), measured.get("loss-after", 0.0)
    became_nan = math.isnan(after) and not math.isnan(before)
    return "loss-after" if after == math.inf or became_nan else ""


def reason(error: Exception) -> str:
    """Return what the server is told of an exception: a UserError's own words, else its type and message."""
    return str(error) if isinstance(error, UserError) else describe(error)
