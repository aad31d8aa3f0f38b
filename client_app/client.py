"""The only NumPyClient: one download in, merge, evaluate, train, evaluate, upload; every method is a LocalUpdate inside it."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.compat.client.numpy_client import NumPyClient
from flwr.compat.common.typing import Config, NDArrays

from client_app.state import State, StateStore, state_root
from fl_app import extras, tasks, wire
from fl_app.config import RunConfig
from fl_app.data import ClientData, open_client
from fl_app.errors import UserError, diverged
from fl_app.keys import Scalar
from fl_app.metrics import FINETUNED, MAX_NUMBER, moments
from fl_app.sources import source_of
from fl_app.wire import Download, Upload
from strategies.base import Method, RoundContext

if TYPE_CHECKING:
    from client_app.private import Masker

log = logging.getLogger("corolla")

HOPELESS = 1e4  # a loss from which no training comes back, and to which none on a client's own data leads
_looked_at: set[tuple[str, str, str]] = set()  # data whose files this process has compared with what they were


class CorollaClient(NumPyClient):
    """One client of a run. Failures are reported to the server by name instead of raised."""

    def __init__(
        self, config: RunConfig, method: Method[Any], client_id: int, data_path: str, keys: str = "", run: int = 0
    ) -> None:
        self.config, self.method, self.client_id, self.data_path, self.keys = config, method, client_id, data_path, keys
        self.run = run
        self._timings: dict[str, float] = {}
        self._fallback: dict[str, Scalar] = {}  # for the metrics, if the state the server named is damaged

    def get_properties(self, config: Config) -> Config:
        """Say who this is and what data it has, or why it cannot take part. Does not import torch on a CPU.

        This is asked once, when a run starts; the first in a process looks whether files of the data have been overwritten.
        """
        try:
            return self._properties()
        except Exception as error:
            log.debug("properties", exc_info=True)
            return {"client-id": self.client_id, wire.ERROR: describe(error)}

    def _properties(self) -> Config:
        source = (self.config.dataset, self.config.data_dir, self.data_path)
        self.data = open_client(self.config, self.client_id, data_path=self.data_path, look=source not in _looked_at)
        _looked_at.add(source)
        if self.config.device.startswith("cuda"):
            from client_app.device_model import resolve_device

            resolve_device(self.config.device)
        tasks.require_packages(self.config)
        if self.config.dp_epsilon:
            extras.require("opacus", "dp-epsilon")
            from client_app.dp import Plan

            Plan.of(self.config, len(self.data.y_train), self.method.dp_epochs_of(self.config))
        properties: Config = {
            "client-id": self.client_id,
            "num-clients": self.config.num_clients,
            "train-samples": self._told_count(len(self.data.y_train)),
            "test-samples": self._told_count(len(self.data.y_test)),
            **about(self.data, self.config),
        }
        if self.config.private:
            from client_app import private
            from fl_app.privacy.keyring import open_keyring

            keys = open_keyring(self.keys, self.config.seed, self.client_id, self.config.num_clients)
            properties |= private.properties(keys)
        return properties

    def fit(self, parameters: NDArrays, config: Config) -> tuple[NDArrays, int, Config]:
        """Train one round ("train"), hand out the personal model ("collect") or remove what is kept of a run ("forget")."""
        try:
            download = wire.decode_download(parameters, config)
            upload = {"collect": self._collect, "forget": self._forget}.get(download.task, self._train)(download)
            arrays, num_examples, metrics = wire.encode_upload(upload)
            return arrays, num_examples, dict(metrics)
        except Exception as error:
            log.exception("client %d failed", self.client_id)
            return [], 0, {wire.ERROR: describe(error)}

    def evaluate(self, parameters: NDArrays, config: Config) -> tuple[float, int, Config]:
        """Evaluate the personalized model; with finetune-epochs also what so many local epochs make of it."""
        try:
            download = wire.decode_download(parameters, config)
            ctx, state, trainer = self._context(download)
            update = self.method.local_update()
            start = update.merge(download.model, state, ctx)
            model = update.personal(start, state, ctx)
            names = [metric.name for metric in tasks.measured(self.config)]
            loss, found = trainer.measure(model, names)
            if self.config.finetune_epochs:
                tuned = update.finetune(model, state, ctx, self.config.finetune_epochs)
                found = {
                    **found,
                    **{f"{name}{FINETUNED}": value for name, value in trainer.measure(tuned, names)[1].items()},
                }
            measured = self._told({"loss": loss, **found}, trainer.learning_rate)
            metrics: dict[str, Scalar] = {
                **measured,
                "sha256": hashlib.sha256(update.export(model, state, ctx).params.tobytes()).hexdigest(),
                **self._fallback,
            }
            return float(metrics.pop("loss")), self._told_count(len(self.data.y_test)), dict(metrics)
        except Exception as error:
            log.exception("client %d failed", self.client_id)
            return 0.0, 0, {wire.ERROR: describe(error)}

    @cached_property
    def data(self) -> ClientData:
        """This client's part of the data."""
        return open_client(self.config, self.client_id, data_path=self.data_path)

    def _collect(self, download: Download) -> Upload:
        if self.config.private:
            raise UserError("private: this client hands out no model of its own")
        ctx, state, _ = self._context(download)
        update = self.method.local_update()
        start = update.merge(download.model, state, ctx)
        model = update.export(update.personal(start, state, ctx), state, ctx)
        return Upload(model, metrics=self._fallback, num_examples=ctx.num_samples)

    def _forget(self, download: Download) -> Upload:
        store = StateStore(state_root(self.config.state_dir), download.experiment, self.client_id)
        store.forget(simulated=self.keys == wire.SEED_KEYS)
        return Upload(download.model)

    def _train(self, download: Download) -> Upload:
        ctx, state, trainer = self._timed("prepare", lambda: self._context(download))
        masker = self._timed("prepare", lambda: self._masker(download))
        update = self.method.local_update()
        start = self._timed("merge", lambda: update.merge(download.model, state, ctx))
        personal = self._timed("evaluate", lambda: update.personal(start, state, ctx))
        loss_before, before = self._timed("evaluate", lambda: trainer.evaluate(personal))
        try:
            trained = self._timed("train", lambda: update.train(start, state, ctx))
        except UserError as error:
            if not self.config.report_accuracy or not len(self.data.y_test) or loss_before < HOPELESS:
                raise
            raise UserError(f"{error}; the model it was sent had a loss of {loss_before:.3g} already") from None
        train_loss = trainer.last_loss
        update.keep_local(trained, state, ctx)
        used = self._timed("evaluate", lambda: update.personal(trained, state, ctx))
        loss_after, after = self._timed("evaluate", lambda: trainer.evaluate(used))
        name_before, name_after = moments(trainer.task.headline.name)
        measured = {
            name_before: before,
            name_after: after,
            "loss": train_loss,
            "loss-before": loss_before,
            "loss-after": loss_after,
        }
        told = self._told(measured, trainer.learning_rate)
        upload = self._timed("score", lambda: update.upload(start, trained, state, ctx))
        if masker:
            upload = self._timed("score", lambda: masker.masked(upload))
        version = self._timed("state", lambda: self._save(state, download))
        metrics: dict[str, Scalar] = {
            **told,
            "test-samples": self._told_count(len(self.data.y_test)),
            "state-version": version,
            **({"dp-epsilon": trainer.epsilon, "dp-noise": trainer.plan.noise} if self.config.dp_epsilon else {}),
            **self._fallback,
            **{f"seconds-{name}": seconds for name, seconds in self._timings.items()},
            **upload.metrics,
        }
        return Upload(upload.model, upload.mask, upload.extras, metrics, self._told_count(ctx.num_samples))

    def _context(self, download: Download) -> tuple[RoundContext[Any], State, Any]:
        """Build what the method's client half works with."""
        from client_app.process import prepare_training

        prepare_training(self.config.client_threads)
        from client_app.context import build

        self._store = StateStore(state_root(self.config.state_dir), download.experiment, self.client_id)
        state = self._store.load(download.state_version)
        if state.version != download.state_version:
            self._fallback = {wire.STATE_USED: state.version}
        place = self._store.directory
        context = build(self.config, self.method, self.data, download, self.client_id, place, self.keys, self.run)
        return context, state, context.trainer

    def _save(self, state: State, download: Download) -> str:
        read_from = state.version  # a repetition of this round would start from it again
        version = self._store.save(state, download.round, download.attempt)
        self._store.delete_before(read_from, download.keep)
        return version

    def _told(self, measured: Mapping[str, float], learning_rate: float) -> dict[str, Scalar]:
        """What the server is told of losses and metrics: nothing with `report-accuracy = false`.

        Raises UserError if they say that training diverged.
        """
        if not self.config.report_accuracy:
            return dict.fromkeys(measured, math.nan)
        if name := beyond(measured):
            raise diverged(name, measured[name], learning_rate)
        return dict(measured)

    def _told_count(self, samples: int) -> int:
        """What the server is told of a number of samples: 1 where it need not know."""
        return samples if self.method.tells_counts(self.config) else 1

    def _masker(self, download: Download) -> Masker | None:
        """Claim the attempt of a private round; raises UserError if it must not be answered."""
        if not self.config.private:
            return None
        from client_app import private
        from fl_app.privacy.keyring import open_keyring

        keyring = open_keyring(self.keys, self.config.seed, self.client_id, self.config.num_clients)
        masker = private.Masker.of(download, self.config, keyring)
        self._store.claim(wire.state_version(download.round, download.attempt))
        return masker

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        self._timings[phase] = self._timings.get(phase, 0.0) + time.perf_counter() - started
        return result


class Refusal(NumPyClient):
    """A client that cannot take part, and says why, whatever it is asked."""

    def __init__(self, client_id: int, why: str) -> None:
        self.client_id, self.answer = client_id, {wire.ERROR: why}

    def get_properties(self, config: Config) -> Config:
        """Say who this is, and why not."""
        return {"client-id": self.client_id, **self.answer}

    def fit(self, parameters: NDArrays, config: Config) -> tuple[NDArrays, int, Config]:
        """Say why not."""
        return [], 0, {**self.answer}

    def evaluate(self, parameters: NDArrays, config: Config) -> tuple[float, int, Config]:
        """Say why not."""
        return 0.0, 0, {**self.answer}


def about(data: ClientData, config: RunConfig) -> Config:
    """What a client tells of its data: their shape, and their classes where it may."""
    info = data.info
    told: Config = {"in-channels": info.in_channels, "image-size": info.image_size, "num-classes": info.num_classes}
    if info.shape:  # not square images
        told["input-shape"] = ",".join(map(str, info.shape))
    if config.report_class_counts or source_of(config.dataset).tells_classes:
        # a model's outputs are read by them
        told["class-names"] = json.dumps(info.classes)
    if config.report_class_counts and not config.private and not config.dp_epsilon and tasks.of(config).has_classes:
        told["class-counts"] = ",".join(map(str, np.bincount(data.y_train, minlength=info.num_classes)))
    return told


def beyond(measured: Mapping[str, float]) -> str:
    """Return which of the losses and metrics says that training diverged, "" if none: one larger than the server takes, or the
    loss after training, if that is infinite, or no number where there was one before.
    """
    if large := next((name for name, value in measured.items() if MAX_NUMBER < abs(value) < math.inf), ""):
        return large
    before, after = (measured.get(f"loss-{moment}", 0.0) for moment in ("before", "after"))
    return "loss-after" if after == math.inf or (math.isnan(after) and not math.isnan(before)) else ""


def describe(error: Exception) -> str:
    """Return one readable line for an exception."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
