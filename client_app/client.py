"""A client of a run: receive, merge, evaluate, train, evaluate, upload. Every method is a LocalUpdate inside it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from client_app import at_once
from client_app.notes import Notes, OwnData, spent_on
from client_app.session import Session
from client_app.stored_state import StateStore, StoredState, state_root
from fl_app import debugging, extras, reasons, software, tasks, trainable_tensors
from fl_app.checksums import HASHES, stamp_of
from fl_app.config import RunConfig
from fl_app.config.rules import split_names
from fl_app.data import ClientData, client_names, data_root
from fl_app.data.moments import MomentSums, Scaling
from fl_app.debugging import Place
from fl_app.errors import DIVERGED, Diverged, UserError, diverged
from fl_app.keys import Scalar
from fl_app.known_names import CLIENT_NAME
from fl_app.layout import Layout, Model
from fl_app.metrics import (
    EPSILON,
    FINETUNED,
    GLOBAL,
    LOSS,
    MAX_NUMBER,
    OF_EVERY_METHOD,
    ONE_CLASS,
    REPLACE_EPSILON,
    VALIDATION,
    of_evaluation,
    of_training,
    range_error,
)
from fl_app.model_names import ModelNames, differ
from fl_app.run_secret import experiment_of
from fl_app.server.properties import COLUMNS, CONTENT, INPUT, MODEL_NAMES, NORMALIZATION, SOFTWARE, SUMS, normalization
from fl_app.site_directory import site_directory
from fl_app.sources import NODE, source_of
from fl_app.stopwatch import Stopwatch
from fl_app.transport import wire
from fl_app.transport.flower import RecordDict
from fl_app.transport.outgoing import Way
from fl_app.transport.wire import FEATURE_TAGS, FEATURES, Download, Upload
from strategies.base import RoundContext, hooks
from strategies.kernels import Part

if TYPE_CHECKING:
    from client_app.flat import FlatModule
    from client_app.private_round import Masker
    from client_app.run_keys import SiteKeys
    from client_app.session import Network
    from client_app.trainer import LocalTrainer

log = logging.getLogger("corolla")

# training on a client's own data neither reaches such a loss or parameter nor recovers from it
DIVERGED_LOSS = 1e4
DIVERGED_PARAMETER = 1e6
# inputs and targets beyond it count as far from 1; standardised ones hardly ever reach it
FAR = 30.0
# most channels of an image; with more features only one client sends mean and deviation
MOST_CHANNELS = 16


class CorollaClient:
    """One client of a run. A failure is reported in the reply, with its reason, and not raised."""

    def __init__(
        self,
        session: Session,
        client_id: int,
        data_path: str,
        keys: str = "",
        run: int = 0,
        place: Place = Place.DEPLOYMENT,
        name: str = "",
    ) -> None:
        """name: the site's, as its SuperNode was started with; "" if it has none."""
        self.name = name
        self.session, self.config, self.method = session, session.config, session.method
        self.place = place
        self.client_id, self.data_path, self.keys, self.run = client_id, data_path, keys, run
        # metrics that name the state used instead, if the one that the server named is damaged
        self._fallback: dict[str, Scalar] = {}
        # the network that a task trains or evaluates with
        self._used: tuple[Network, FlatModule] | None = None

    # Messages

    def get_properties(self, content: RecordDict) -> RecordDict:
        """Reply with this client's id and its data's properties, or why it cannot take part; or answer a private round's question.

        On a CPU this does not import torch. The server asks once, when a run starts. The first client of a process
        checks whether files of the data were overwritten.
        """
        try:
            question = wire.decode_download(content, "getproperties")
            told = self._answered(question) if question.task else self._properties()
        except Exception as error:
            name = {CLIENT_NAME: self.name} if self.name and not self.config.is_confidential else {}
            told = {"client-id": self.client_id, **name, **refused(self.client_id, error, self.place)}
        return wire.properties_reply(told)

    def fit(self, content: RecordDict) -> RecordDict:
        """Answer a task: "train" a round, "collect" the personal model, or "forget" all that is kept of a run."""
        aside: dict[str, Scalar] = {}
        try:
            with self._printing_into(aside):
                download = self._decoded(content, "fit")
                answer = {"collect": self._collect, "forget": self._forget}.get(download.task, self._train)
                upload = answer(download)
            reply = wire.encode_upload(dataclasses.replace(upload, metrics={**upload.metrics, **aside}))
            self._leave_network()
            return reply
        except Exception as error:
            return wire.fit_reply({}, 0, {**self._failed(error), **aside})

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Evaluate the personalized model, after `finetune-epochs` again, and with `evaluate-global` the global model."""
        aside: dict[str, Scalar] = {}
        try:
            with self._printing_into(aside):
                metrics = self._evaluate(self._decoded(content, "evaluate"))
                self._leave_network()
            loss, count = float(metrics.pop("loss")), self._reported_count(self.data.num_test)
            return wire.evaluate_reply(loss, count, {**metrics, **aside})
        except Exception as error:
            return wire.evaluate_reply(0.0, 0, {**self._failed(error), **aside})

    def _decoded(self, content: RecordDict, what: str) -> Download:
        """Return a message. From here on the client's data have the columns that it names, in their order."""
        download = wire.decode_download(content, what)
        if (text := download.method.get(COLUMNS)) is not None:
            if self.config.private:
                raise UserError(
                    "private: the server names columns, and a site's answer would show whether it has them",
                    code="protocol",
                    key="private",
                    rule="hidden",
                )
            with reasons.stage("protocol", "dataset", "readable"):
                self.data = self.data.with_columns(tuple(map(str, json.loads(str(text)))))
        elif (text := download.method.get(MODEL_NAMES)) is not None:
            if self.config.private:
                self._require_start(download.experiment, str(text))
            features = tuple(json.loads(str(text))["features"])
            # other names are refused before the model is used
            if sorted(features) == sorted(self.data.info.facts.features):
                self.data = self.data.with_columns(features)
        return download

    def _require_start(self, experiment: str, names: str) -> None:
        """Raise UserError unless a private run starts from a model with these names, and no others."""
        with reasons.stage("protocol", "private", "hidden"):
            if not (self.config.initial_weights or self.config.from_run):
                raise UserError(
                    key="private", rule="the server names a model's columns, and the run starts from no model"
                )
            self._site_keys.require_start(experiment, names)

    def _answered(self, question: Download) -> dict[str, Scalar]:
        from client_app.private_round import answered

        with reasons.stage("protocol", "private", "hidden"):
            if not self.config.private:
                raise UserError(key="private", rule="this run is not private")
            return {**answered(question, self._site_keys)}

    # A client's turn in a round

    def _train(self, download: Download) -> Upload:
        update = self.method.local_update()
        watch = Stopwatch()
        ctx, state, trainer = self._prepare(download)
        with reasons.stage("protocol", "private", "hidden"):
            masker = self._claim_attempt(download, ctx.num_samples)
        watch.lap("prepare")
        with self._naming_divergence(trainer, download.model):
            start = update.merge(download.model, state, ctx)
            watch.lap("merge")
            before = self._measured(update.personal(start, state, ctx), trainer, "before")
        watch.lap("evaluate")
        loss_before = before["loss-before"]
        try:
            with reasons.stage("method"):
                trained = update.train(start, state, ctx)
        except Exception as error:
            if not (masker and self._hides_failure(error)):
                raise self._training_error(error, trainer, start, loss_before) from None
            log.error("client %d: it sends the model that it received", self.client_id, exc_info=error)
            masker.note_clipped(debugging.reason(error))
            trained = start
        train_loss = trainer.last_loss
        with self._naming_divergence(trainer, trained, loss_before):
            update.keep_local(trained, state, ctx)
            watch.lap("train")
            after = self._measured(update.personal(trained, state, ctx), trainer, "after")
            watch.lap("evaluate")
            # the first figure that shows a divergence is named: metrics, then the training loss, then other losses
            figures = sorted({**before, LOSS.name: train_loss, **after}.items(), key=lambda item: _order(item[0]))
            reported = self._reported(dict(figures), trainer)
            upload = update.upload(start, trained, state, ctx)
            if not masker:
                wire.check_finite({"params": upload.model.params, "buffers": upload.model.buffers, **upload.extras})
        if masker:
            with reasons.stage("protocol", "private-range", "in-range"):
                upload = masker.mask(upload)
        watch.lap("score")
        version = self._save(state, download)
        watch.lap("state")
        metrics: dict[str, Scalar] = {
            **reported,
            "test-samples": self._reported_count(self.data.num_test),
            wire.STATE_VERSION: version,
        }
        if self.config.dp_epsilon:
            metrics |= self._spending(trainer)
        metrics |= self._fallback
        metrics |= {f"seconds-{phase}": seconds for phase, seconds in watch.laps.items()}
        metrics |= self._own(upload.metrics, trainer)
        metrics |= self._failed_metrics(trainer)
        return Upload(upload.model, upload.mask, upload.extras, metrics, self._reported_count(ctx.num_samples))

    def _spending(self, trainer: Any) -> dict[str, Scalar]:
        """Return the numbers of a privacy budget: a site's limit, and elsewhere what is spent, and the noise.

        What a site has spent and its noise follow from its number of records, so they stay in its log.
        """
        spent = {EPSILON: trainer.epsilon, REPLACE_EPSILON: trainer.replace_epsilon, "dp-noise": trainer.plan.noise}
        if self.place is not Place.DEPLOYMENT:
            return spent
        log.info("client %d: %s", self.client_id, ", ".join(f"{name} {value:.4g}" for name, value in spent.items()))
        return {EPSILON: trainer.budget.limit}

    # Other tasks

    def _properties(self) -> dict[str, Scalar]:
        self._require_classes()
        with reasons.stage("data", "dataset", "readable"):
            self.session.prepare_changed_data(self.data_path)
        if self.config.device.startswith("cuda"):
            from client_app.trainer import resolve_device

            with reasons.stage("capability", "device", "available"):
                resolve_device(self.config.device)
        with reasons.stage("capability", "task", "installed"):
            tasks.require_packages(self.config)
        if self.config.dp_epsilon:
            with reasons.stage("capability", "dp-epsilon", "installed"):
                extras.require("opacus", "dp-epsilon")
            from client_app.dp import Plan, Spent, check_module

            with reasons.stage("method", "model", "per-record"):
                self.session.check_once(check_module, self.data.info)
            # a resumed run's own spending cannot be separated from that of other runs here
            own = None if self.keys == wire.SEED_KEYS or self.config.resume else self._own_data()
            before = Spent.of(spent_on(site_directory(), own) if own else [])
            with reasons.stage("budget", "dp-epsilon", "affordable"):
                Plan.of(self.config, self.data.num_train, self.method.dp_epochs_of(self.config), before)
        if any(left := self.data.unknown):
            what = "training and %d test samples are left out: their label is not in `classes`"
            log.warning(f"client %d: %d {what}", self.client_id, *left)
        properties: dict[str, Scalar] = {
            "client-id": self.client_id,
            "num-clients": self.config.num_clients,
            "train-samples": self._reported_count(self.data.num_train),
            "test-samples": self._reported_count(self.data.num_test),
            **data_properties(self.data, self.config),
            **self._data_hashes(),
            SOFTWARE: json.dumps({**software.announced(), software.WIRE: wire.WIRE_VERSION}),
        }
        names = client_names(self.config, self.data.info)
        if (name := names[self.client_id] if names else self.name) and not self.config.is_confidential:
            properties[CLIENT_NAME] = name
        own_data = self.config.dataset == NODE
        if (text := self._input_facts()) and len(text) <= wire.MAX_TEXT:
            properties[INPUT] = text
        if (own_data or self.config.initial_weights or self.config.from_run) and not self.config.private:
            properties[FEATURES] = json.dumps(self.data.info.facts.features)
        if self._needs_agreement:
            properties[SUMS] = self._sums()
        elif own_data and not self.config.is_confidential:
            properties[CONTENT] = self._content()
        if self.config.private:
            from client_app import private_round

            with reasons.stage("deployment", "private", "keys"):
                keys = self._site_keys.keys
            properties |= private_round.properties(keys)
            if own_data:
                info = self.data.info
                properties[FEATURE_TAGS] = private_round.tags(keys, json.dumps([info.facts.features, info.classes]))
        return properties

    def _require_classes(self) -> None:
        """Raise UserError if a run with a promise has no classes for a site's data."""
        config = self.config
        own = self.place is Place.DEPLOYMENT and source_of(config.dataset).known is None
        if own and config.is_confidential and not config.classes and tasks.of(config).has_classes:
            raise UserError(
                "classes: a run that is private or has a privacy budget must declare the names of the classes; they would show "
                "which labels a site has",
                code="configuration",
                key="classes",
                rule="declared",
            )

    def _input_facts(self) -> str:
        """Return the facts by which an exported model reads raw rows, as JSON.

        Empty where the server must not know them, or where another client sends them.
        """
        own_data, info = self.config.dataset == NODE, self.data.info
        if self.config.is_confidential or not (own_data or self.client_id == 0):
            return ""
        # The columns that a site leaves out, and the values that it fills in, are its own business.
        found = info.columns_facts()
        if own_data:
            told = [dataclasses.asdict(encoding.as_told) for encoding in info.facts.encodings]
            found = {"encodings": told, "others": []}
        return json.dumps({"dtype": str(self.data.x_train.dtype), **found})

    @property
    def _needs_agreement(self) -> bool:
        """Whether sites, each with its own data, must agree on one mean and deviation to scale inputs by."""
        config = self.config
        if config.dataset != NODE or config.normalizes_by_site or config.normalizes_by_initial:
            return False
        return tasks.normalization(config, self.data.x_train.dtype) == "mean-std"

    def _sums(self) -> str:
        """Return sums over this site's training samples, from which all sites' mean and deviation follow.

        Validation samples are included, as they are in the data set's own mean and deviation. Raises UserError if the
        text is too long.
        """
        facts = self.data.info.facts
        found = MomentSums.of(self.data.x_train, facts.shift, facts.scale)
        if len(self.data.x_validation):
            found += MomentSums.of(self.data.x_validation, facts.shift, facts.scale)
        sums = found.to_json()
        if len(sums) > wire.MAX_TEXT:
            raise UserError(
                f"normalize-over: sites cannot agree on {len(self.data.info.mean)} features: their sums take {len(sums)} "
                f"characters, more than {wire.MAX_TEXT}; set normalize-over = site",
                code="configuration",
                key="normalize-over",
            )
        return sums

    def _content(self) -> str:
        """Return a hash of all samples that are not for test, whatever order they and their named columns have."""
        data, facts = self.data, self.data.info.facts
        order = np.argsort(facts.features) if len(facts.features) > 1 else None
        found = []
        for x, y in ((data.x_train, data.y_train), (data.x_validation, data.y_validation)):
            for k in range(len(x)):
                sample = x[k] if order is None else x[k][order]
                found.append(hashlib.sha256(sample.tobytes() + y[k].tobytes()).digest())
        return hashlib.sha256(b"".join(sorted(found))).hexdigest()

    def _scaled(self, download: Download) -> ClientData:
        """Return this client's data, with the mean and deviation that the server sends: the sites' common or the model's own.

        Raises UserError if the server does not send them.
        """
        with reasons.stage("protocol", "initial-weights", "same-model"):
            self._compare_names(download)
        by_model = self.config.normalizes_by_initial
        if not by_model and not self._needs_agreement:
            return self.data
        info = self.data.info
        if by_model and (how := tasks.normalization(self.config, self.data.x_train.dtype)) != "mean-std":
            raise UserError(
                f"normalize-over: initial needs inputs scaled by mean and std, and these are scaled by {how}",
                code="configuration",
                key="normalize-over",
            )
        agreed = normalization(download.method.get(NORMALIZATION))
        if agreed is None or len(agreed["mean"]) != len(info.mean):
            of = "of the model in initial-weights" if by_model else "that the sites agreed on"
            raise UserError(
                f"normalize-over: the server must send mean and std of {len(info.mean)} features or channels {of}, got "
                f"{len(agreed['mean']) if agreed else 'none'}",
                code="protocol",
                key="normalize-over",
            )
        own = Scaling.from_json(agreed).stored_with(info.facts.shift, info.facts.scale)
        return dataclasses.replace(self.data, info=dataclasses.replace(info, mean=own.mean, std=own.std))

    def _compare_names(self, download: Download) -> None:
        """Raise UserError if the model that a private run starts from has features of other names, or other classes.

        There only the client can compare them. The error must not contain its own names.
        """
        if (text := download.method.get(MODEL_NAMES)) is None:
            return
        mine, told = ModelNames.of(self.data.info), json.loads(str(text))
        for what, ours in (("features", mine.features), ("classes", mine.outputs)):
            if differ(told[what], ours):
                key = "initial-weights" if self.config.initial_weights else "from"
                raise UserError(key=key, rule=f"the {what} of the model have other names than this client's")

    def _data_hashes(self) -> dict[str, Scalar]:
        """Return the hashes that identify the data, and the inputs' scaling where no client may hide it."""
        hashes = self.session.told_hashes(self.data_path)
        if hashes is None:
            return {}
        found: dict[str, Scalar] = dict(zip(HASHES, hashes, strict=True))
        info = self.data.info
        # with many features, one client's copy is enough
        shared = hashes.partition and not self.config.normalizes_by_site
        if shared and (self.client_id == 0 or len(info.mean) <= MOST_CHANNELS):
            found[NORMALIZATION] = json.dumps(info.scaling)
        return found

    def _evaluate(self, download: Download) -> dict[str, Scalar]:
        ctx, state, trainer = self._prepare(download)
        with self._naming_divergence(trainer, download.model):
            return self._evaluated(download, ctx, state, trainer)

    def _evaluated(
        self, download: Download, ctx: RoundContext[Any], state: StoredState, trainer: Any
    ) -> dict[str, Scalar]:
        update = self.method.local_update()
        start = update.merge(download.model, state, ctx)
        model = update.personal(start, state, ctx)
        measured = self._measured(model, trainer)
        if self.config.evaluate_global:
            received = update.global_model(download.model, state, ctx)
            of_global = self._measured(received, trainer, GLOBAL.removeprefix("-"))
            measured |= {name: value for name, value in of_global.items() if not _is_loss(name)}
        if self.config.finetune_epochs:
            trainer.begin_finetuning()
            tuned = update.finetune(model, state, ctx, self.config.finetune_epochs)
            after = self._measured(tuned, trainer, FINETUNED.removeprefix("-"))
            measured |= {name: value for name, value in after.items() if not _is_loss(name)}
        exported = self.method.exported.model(model, state, ctx)
        if self.config.dataset == NODE:
            self._keep(exported, measured, ctx.layout, download)
        return {
            **self._reported(measured, trainer),
            # by a hash, guesses of the data can be tested: a clone of this client with the right data has the same model
            **({} if self.config.is_confidential else wire.hashes(exported)),
            **self._fallback,
            **self._failed_metrics(trainer),
        }

    def _keep(self, model: Model, measured: Mapping[str, float], layout: Layout, download: Download) -> None:
        """Keep the client's own model at its site, for `corolla node export`."""
        from client_app import kept_model

        data, experiment = self._scaled(download), download.experiment
        try:
            who = kept_model.Who(self.client_id, self.name)
            kept_model.keep(self.config, experiment, download.round, who, data, layout, model, measured)
        except OSError as error:
            log.warning("client %d: its own model could not be kept: %s", self.client_id, error)

    def _collect(self, download: Download) -> Upload:
        if self.config.private:
            raise UserError(key="private", rule="this client sends no personal model")
        ctx, state, _ = self._prepare(download)
        update = self.method.local_update()
        start = update.merge(download.model, state, ctx)
        model = self.method.exported.model(update.personal(start, state, ctx), state, ctx)
        return Upload(
            model, metrics=self._fallback, num_examples=self._reported_count(ctx.num_samples), dtype=wire.WHOLE
        )

    def _forget(self, download: Download) -> Upload:
        """Remove what is kept of a run; its keys in any case, its state and notes unless the run keeps them."""
        told: dict[str, Scalar] = {}
        self._open_store(download)
        if self.config.private:
            told[wire.CLIPPED] = self._site_keys.forget(download.experiment)
        if not self.config.keep_state:
            self._store.forget()
            self._notes.forget()
        return Upload(download.model, metrics=told)

    # A task's data and state, and the model in a trainer

    @cached_property
    def data(self) -> ClientData:
        """This client's part of the data."""
        with reasons.stage("data", "dataset", "readable"):
            return self.session.data(self.client_id, self.data_path)

    def _prepare(self, download: Download) -> tuple[RoundContext[Any], StoredState, Any]:
        """Load the state and build the run's model. Return the method's context, the state and the trainer.

        Raises UserError if the download is of another model, or if the state was trained without a privacy budget.
        """
        from client_app.process import prepare_training

        prepare_training(self.config.client_threads)
        from client_app.trainer import LocalTrainer

        config, method = self.config, self.method
        if config.patience:
            config = dataclasses.replace(config, drops=max(0, int(download.method[wire.DROPS])))
        with reasons.stage("deployment", "state-dir", "outside"):
            self._open_store(download)
        with reasons.stage("deployment", "state-dir", "state"):
            state = self._first_state(download) or self._store.load(download.state_version)
            self._require_state(state, download.state_version)
        if state.version != download.state_version:
            self._fallback = {wire.STATE_USED: state.version}
        # With `train` or `share`, tensors that never travel start from the file too: the server does not send them.
        weights_file = config.initial_weights if config.train or config.share else ""
        data = self.data
        with reasons.stage("capability", "model", "available"):
            network = self._network(weights_file)
        facts = network.facts
        with reasons.stage("protocol", "model", "same-model"):
            held = method.submodel
            part = None if held is None else held.sent_part(facts.shared_layout, download.extras)
            check_same_model(download, facts.layout, facts.shared_layout, config.model, part)

        @functools.cache
        def initial() -> Model:
            start = facts.initial()
            if config.initial_weights and not weights_file and method.local_from_file:
                start = self.session.initial(self.data.info, config.initial_weights, facts.layout)
            # the method may write into it
            return Model(start.params.copy(), start.buffers.copy())

        trainer = LocalTrainer(network.module, config, self._scaled(download), download.round, self.client_id)
        self._used = network, trainer.flat
        ctx = RoundContext(
            config=config,
            params=config.params,
            round=download.round,
            client_id=self.client_id,
            layout=facts.layout,
            shared=facts.shared,
            initial=initial,
            trainer=self._with_budget(trainer) if config.dp_epsilon else trainer,
            num_samples=data.num_train,
            extras=download.extras,
        )
        return ctx, state, ctx.trainer

    def _first_state(self, download: Download) -> StoredState | None:
        """Return the state of the run that this run goes on from, None if it goes on from none or has a state of its own.

        The state stays where it is. Raises UserError if it is missing or damaged.
        """
        if download.state_version or (text := download.method.get(wire.STATE_OF)) is None:
            return None
        told = json.loads(str(text))
        root = state_root(self.config.state_dir)
        noisy = self.config.dp_epsilon > 0
        store = StateStore(root, experiment_of(str(told["secret"])), int(told["client"]), noisy)
        state = store.load(str(told["version"]))
        self._require_state(state, str(told["version"]))
        return StoredState(state.arrays)

    def _require_state(self, state: StoredState, version: str) -> None:
        """Raise UserError if a private run would continue from an older state than the members of the client's aggregation group.

        The server may know how to bring about an older state. Then it knows more of the upload.
        """
        if state.version != version and self.config.private and self.config.private_left_out == "group":
            raise UserError(key="private", rule=f"the state {version} is missing or damaged")

    def _network(self, weights_file: str) -> Network:
        """Return the run's network. In a lane it is the previous client's, to be set by `load`."""
        info = self.data.info
        # opacus leaves its marks on a network
        lane = at_once.current()
        if lane is None or self.config.dp_epsilon:
            return self.session.network(info, weights_file)
        stamp = stamp_of(Path(weights_file)) if weights_file else None
        name = ("network", tuple(sorted(info.model_arguments.items())), weights_file, stamp)
        return lane.keep(name, lambda: self.session.network(info, weights_file))

    def _leave_network(self) -> None:
        """Leave the network for the next client of this process. A task that failed leaves none."""
        if not self._used:
            return
        network, flat = self._used
        if (lane := at_once.current()) is None:
            self.session.leave(network, flat)
        elif not flat.is_restorable:
            lane.kept.clear()

    def _open_store(self, download: Download) -> None:
        """Open the client's state of an experiment, and its site's notes on it. Raises UserError."""
        config, simulated = self.config, self.keys == wire.SEED_KEYS
        root = state_root(config.state_dir)
        self._store = StateStore(root, download.experiment, self.client_id, config.dp_epsilon > 0)
        # The SuperNode checks the machine's own settings when it starts. In a simulation all clients' directories lie
        # in one, so one check of that is enough.
        if config.state_dir and simulated:
            self.session.refuse_within_site("state-dir", root, download.experiment)
        elif config.state_dir:
            self.session.refuse_within_site("state-dir", self._store.directory)
        if config.data_dir:
            self.session.refuse_within_site("data-dir", data_root(config))
        own = self._own_data() if config.dp_epsilon and not simulated else None
        self._notes = Notes(site_directory(), download.experiment, self.client_id, self.run, simulated, own)

    def _own_data(self) -> OwnData | None:
        """Return the site's records that this client trains on, or None if they come with a Python package."""
        with reasons.stage("data", "dataset", "readable"):
            return OwnData.of(self.session.opened(self.data_path), self.data_path, self.client_id)

    def _with_budget(self, trainer: LocalTrainer) -> Any:
        """Return a trainer that reads records only in noisy steps, within these records' privacy budget."""
        # Opacus takes seconds to import
        from client_app.dp import Budget, NoisyTrainer

        budget = Budget(self._notes, self.config)
        return NoisyTrainer(trainer, budget=budget, epochs=self.method.dp_epochs_of(self.config))

    def _claim_attempt(self, download: Download, samples: int) -> Masker | None:
        """Claim the attempt of a private round. Raises UserError if it must not be answered."""
        if not self.config.private:
            return None
        from client_app.private_round import Masker

        return Masker.of(download, self._site_keys, samples, self.method.own_weight(self.config))

    @property
    def _site_keys(self) -> SiteKeys:
        """The client's keys for this run. Raises UserError if it has none."""
        from client_app.run_keys import SiteKeys

        return SiteKeys.open(site_directory(), self.keys, self.config, self.client_id, self.run)

    def _save(self, state: StoredState, download: Download) -> str:
        hooks.check_kept(self.config.method, "state.arrays", state.arrays, converts=True)
        # a repeated round would start from it again
        read_from = state.version
        with reasons.stage("deployment", "state-dir", "writable"):
            version = self._store.save(state, download.round, download.attempt)
        self._store.delete_before(read_from, download.keep)
        return version

    # Prints and exceptions, for the author of a method

    @contextmanager
    def _printing_into(self, aside: dict[str, Scalar]) -> Iterator[None]:
        """Label lines printed inside with this client's number. A site's prints stay in its log.

        In the caller's process lines are shown at once. In a simulation they travel in `aside`, and the server shows
        them.
        """
        if self.place is Place.DEPLOYMENT:
            yield
            return
        lines: list[str] = []

        def show(line: str) -> None:
            debugging.show_printed(f"client {self.client_id}", line)

        try:
            with debugging.printed_lines(show if self.place is Place.IN_PROCESS else lines.append):
                yield
        finally:
            if lines:
                aside[wire.PRINTED] = debugging.cut(lines)

    def _failed(self, error: Exception) -> dict[str, Scalar]:
        """Return the metrics that report an exception to the server. A site's traceback stays in its log."""
        if self.place is Place.DEPLOYMENT:
            return refused(self.client_id, error, self.place)
        told: dict[str, Scalar] = {wire.ERROR: debugging.reason(error)}
        trace = debugging.trace_to_show(error)
        return {**told, wire.TRACEBACK: debugging.cut([trace])} if trace else told

    def widened(self, way: Way) -> Way:
        """Return what may leave, with the numbers that this run's task and method declare.

        With it leave the names of the classes if the server knows them.
        """
        measured = tasks.measured(self.config)
        numbers = (*of_training(measured, True), *of_evaluation(measured, True, True), ONE_CLASS)
        classes = split_names(self.config.classes)
        if source_of(self.config.dataset).known and "data" in self.__dict__:
            classes = self.data.info.classes
        return dataclasses.replace(
            way,
            metrics=frozenset(metric.name for metric in numbers) - {metric.name for metric in OF_EVERY_METHOD},
            own=frozenset(metric.name for metric in self.session.reports),
            known={"class-names": json.dumps(classes)} if classes else {},
        )

    # Figures for the server

    def _measured(self, model: Model, trainer: Any, moment: str = "") -> dict[str, float]:
        """Return a model's losses and metrics on test and validation data, by their names in records.

        moment: `before` or `after` training, `finetuned` or `global`; empty for an evaluation.
        """
        names = self.session.measured
        end = f"-{moment}" if moment else ""
        parts = {"": "test", VALIDATION: "validation"} if self.config.validation_ratio else {"": "test"}
        found: dict[str, float] = {}
        # together with a perfect accuracy it would reveal that a site has only one class
        tells_one_class = not end and not self.config.is_confidential
        for word, part in parts.items():
            asked = [*names, ONE_CLASS.name] if tells_one_class and part == "test" else names
            loss, values = trainer.measure(model, asked, part)
            # NaN for tasks without classes
            if math.isnan(values.get(ONE_CLASS.name, 0.0)):
                del values[ONE_CLASS.name]
            measured = {**values, LOSS.name: loss}
            found |= {f"{word}{name}{end}": value for name, value in measured.items()}
        return found

    def _reported(self, measured: Mapping[str, float], trainer: Any) -> dict[str, Scalar]:
        """Return losses and metrics in the form that the server gets: all NaN with `report-accuracy = false`.

        Raises UserError if they show that training diverged.
        """
        if not self.config.report_accuracy:
            return dict.fromkeys(measured, math.nan)
        if name := diverged_metric(measured):
            raise diverged(name, measured[name], trainer.learning_rate)
        return {name: LOSS.clipped(value) if _is_loss(name) else value for name, value in measured.items()}

    def _own(self, reported: Mapping[str, Scalar], trainer: Any) -> dict[str, Scalar]:
        """Return a method's own metrics, clipped to their ranges.

        One beyond its range becomes NaN, and the trainer's `metric_errors` gets the reason.
        """
        own = dict(reported)
        for metric in self.session.reports:
            if not isinstance(value := own.get(metric.name), float):
                continue
            own[metric.name] = value = metric.clipped(value)
            if error := range_error(metric.name, value, *metric.range):
                own[metric.name], trainer.metric_errors[metric.name] = math.nan, error
        return own

    def _failed_metrics(self, trainer: Any) -> dict[str, Scalar]:
        """Return the reasons why metrics failed, for the server. Empty with `report-accuracy = false`."""
        errors = trainer.metric_errors if self.config.report_accuracy else {}
        if self.place is Place.DEPLOYMENT and errors:
            log.warning("client %d: metrics failed: %s", self.client_id, dict(errors))
            errors = dict.fromkeys(errors, "not computed")
        return {wire.METRIC_ERRORS: "; ".join(f"{name}: {error}" for name, error in errors.items())} if errors else {}

    @cached_property
    def _reports_counts(self) -> bool:
        return self.method.reports_counts(self.config)

    def _reported_count(self, samples: int) -> int:
        """Return a number of samples in the form that the server gets: 1 where it need not know it."""
        return samples if self._reports_counts else 1

    def _hides_failure(self, error: Exception) -> bool:
        """Return whether a failed training of a private run shows only as one bit at the run's end.

        Else the server would learn by its models, and by sizes of batches, which of them the records make fail.
        """
        told = self.config.report_accuracy or reasons.of(error).code in ("budget", "capability")
        return not told and (self.place is Place.DEPLOYMENT or isinstance(error, Diverged))

    @contextmanager
    def _naming_divergence(self, trainer: Any, model: Model, loss_before: float = 0.0) -> Iterator[None]:
        """Let errors of computations with a model name the learning rate if the model has diverged."""
        try:
            yield
        except Exception as error:
            raise self._training_error(error, trainer, model, loss_before) from None

    def _training_error(self, error: Exception, trainer: Any, model: Model, loss_before: float) -> Exception:
        """Return the error of a training or of a computation with its model.

        If the model has diverged, it names the learning rates, whatever failed, and the received model's loss if that
        had diverged already.
        """
        if not self.config.report_accuracy:
            return error
        if not isinstance(error, Diverged) and has_diverged(model):
            error = Diverged(f"{DIVERGED}: {debugging.reason(error)} (learning-rate {trainer.learning_rate:g})")
        if isinstance(error, Diverged):
            error = Diverged(f"{error}{self._own_rates()}{self._far_values()}")
        if not isinstance(error, UserError) or not len(self.data.y_test) or loss_before < DIVERGED_LOSS:
            return error
        return Diverged(f"{error}; the model it was sent had a loss of {loss_before:.3g} already")

    def _own_rates(self) -> str:
        """Return the method's own learning rates, as the end of an error; empty if it has none."""
        rates = {name: value for name, value in vars(self.config.params).items() if name.endswith("_rate")}
        return "".join(f", {self.config.method}.{name.replace('_', '-')} {value:g}" for name, value in rates.items())

    def _far_values(self) -> str:
        """Return advice on data far from 1, as the end of an error; empty if all are near.

        It is empty under privacy too: the ranges are the site's business.
        """
        if self.config.is_confidential:
            return ""
        return "".join(f"; {line}" for line in far_values(self.data, self.config))


def refused(client_id: int, error: Exception, place: Place) -> dict[str, Scalar]:
    """Return the entries that report an exception to the server.

    At a site they are a reason, and the text, which few sites let leave. The site's log has the text and the traceback.
    """
    if place is not Place.DEPLOYMENT:
        return {wire.ERROR: debugging.reason(error)}
    reason = reasons.of(error)
    trace = error if debugging.trace_to_show(error) else None
    log.error("client %d: %s (%s)", client_id, debugging.reason(error), reason, exc_info=trace)
    return {wire.ERROR: str(reason), wire.DETAILS: debugging.reason(error, "the log of its SuperNode")}


def _is_loss(name: str) -> bool:
    """Return whether a reported number is a loss, on any data and at any moment."""
    return name.removeprefix(VALIDATION).startswith(LOSS.name)


def _order(name: str) -> int:
    """Return the rank of a reported number's kind: metrics, then the training loss, then losses of models."""
    return 0 if not _is_loss(name) else 1 if name == LOSS.name else 2


def far_values(data: ClientData, config: RunConfig) -> list[str]:
    """Return a line for the inputs and one for the targets, each if training values are far from 1.

    A learning rate that suits other data is too large for them.
    """
    lines = []
    scaled = tasks.normalization(config, data.x_train.dtype) == "mean-std" or data.x_train.dtype.kind != "f"
    for name, values, advice in (
        ("inputs", data.x_train, 'normalize = "mean-std" scales them'),
        ("targets", data.y_train, "scale them, or lower the learning rate"),
    ):
        if values.dtype.kind == "f" and values.size and not (name == "inputs" and scaled):
            low, high = float(values.min()), float(values.max())
            if max(abs(low), abs(high)) > FAR:
                lines.append(f"{name} are in {low:.4g} .. {high:.4g}: {advice}")
    return lines


def check_same_model(
    download: Download, layout: Layout, received: Layout, model: str, part: Part | None = None
) -> None:
    """Raise UserError if a download is not of this client's model.

    layout: the model's layout. received: the layout of its tensors that travel. part: what the client holds of them;
    None: all.
    """
    theirs = str(download.method.get(trainable_tensors.HASH, ""))
    if layout.constants != theirs:
        raise UserError(
            key="train",
            rule=f"the frozen tensors of model {model} differ from the server's (sha256 "
            f"{layout.constants[:12] or 'of none'}, the server's {theirs[:12] or 'of none'}); every "
            "node needs the same file",
        )
    params, buffers = download.model.params.size, download.model.buffers.size
    d, b = (received.d, received.b) if part is None else (part.d, part.b)
    if download.model.nbytes and (params, buffers) != (d, b):
        raise UserError(
            f"received {params} parameters and {buffers} buffer elements, this "
            f"client's model {model} shares {d} and {b}: is it the server's model?"
        )


def data_properties(data: ClientData, config: RunConfig) -> dict[str, Scalar]:
    """Return the properties of a client's data for the server: their shape, and their classes where allowed."""
    info = data.info
    properties: dict[str, Scalar] = {
        "in-channels": info.in_channels,
        "image-size": info.image_size,
        "num-classes": info.num_classes,
    }
    # samples that are no square images
    if info.shape:
        properties["input-shape"] = ",".join(map(str, info.shape))
    # readers of a model's outputs need the names
    if config.report_class_counts or source_of(config.dataset).tells_classes:
        properties["class-names"] = json.dumps(info.classes)
    if config.report_class_counts and not config.is_confidential and tasks.of(config).has_classes:
        counts = np.bincount(data.y_train, minlength=info.num_classes)
        properties["class-counts"] = ",".join(map(str, counts))
    return properties


def has_diverged(model: Model) -> bool:
    """Return whether a model's values are not finite, or its parameters beyond all those of a sound training."""
    return not (np.abs(model.params).max(initial=0) < DIVERGED_PARAMETER and np.isfinite(model.buffers).all())


def diverged_metric(measured: Mapping[str, float]) -> str:
    """Return the name of a loss or metric that shows that training diverged, or "" if none does.

    It is one larger than the server accepts, or a loss after training that is infinite, or NaN after a number before.
    """
    for name, value in measured.items():
        if MAX_NUMBER < abs(value) < math.inf:
            return name
    before, after = measured.get("loss-before", 0.0), measured.get("loss-after", 0.0)
    became_nan = math.isnan(after) and not math.isnan(before)
    return "loss-after" if after == math.inf or became_nan else ""
