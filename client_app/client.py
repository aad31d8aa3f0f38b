"""A client of a run: receive, merge, evaluate, train, evaluate, upload. Every method is a LocalUpdate inside it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from client_app import at_once
from client_app.notes import Notes, OwnData, spent_on
from client_app.session import Session, prepare_training
from client_app.stored_state import StateStore, StoredState, state_root
from fl_app import debugging, extras, reasons, software, tasks, trainable_tensors
from fl_app.checksums import HASHES
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
    ROUNDING,
    VALIDATION,
    of_evaluation,
    of_training,
    range_error,
)
from fl_app.model_names import ModelNames, differ
from fl_app.run_secret import experiment_of
from fl_app.server.properties import COLUMNS, CONTENT, INPUT, MODEL_NAMES, NORMALIZATION, SOFTWARE, SUMS, normalization
from fl_app.site_directory import refuse_within_site, site_directory
from fl_app.sources import NODE, source_of
from fl_app.stopwatch import Stopwatch
from fl_app.transport import wire
from fl_app.transport.flower import RecordDict
from fl_app.transport.numpy_client import MessageClient
from fl_app.transport.outgoing import Kind, Way
from fl_app.transport.wire import FEATURE_TAGS, FEATURES, Download, Upload
from fl_app.weight_files import stamps_of
from strategies.base import RoundContext, hooks
from strategies.kernels import Part

if TYPE_CHECKING:
    from client_app.private_round import Masker
    from client_app.run_keys import SiteKeys
    from client_app.session import Network
    from client_app.trainer import LocalTrainer

log = logging.getLogger("corolla")

DIVERGED_LOSS = 1e4
DIVERGED_PARAMETER = 1e6
# inputs and targets beyond it count as far from 1; standardised ones hardly ever reach it
FAR = 30.0
# most channels of an image; with more features only one client sends mean and deviation
MOST_CHANNELS = 16


class CorollaClient(MessageClient):
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
        # the message that is answered
        self._download: Download
        # metrics that name the state used instead, if the one that the server named is damaged
        self._fallback: dict[str, Scalar] = {}
        # the network that a task trains or evaluates with, and its trainer
        self._used: tuple[Network, LocalTrainer] | None = None

    # Messages

    def reply(self, kind: Kind, content: RecordDict) -> RecordDict:
        """Return the reply to a message, with all that the client has put into it."""
        answer = {"properties": self._properties_reply, "fit": self._fit_reply, "evaluate": self._evaluation_reply}
        return answer[kind](content)

    def _properties_reply(self, content: RecordDict) -> RecordDict:
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

    def _fit_reply(self, content: RecordDict) -> RecordDict:
        """Answer a task: "train" a round, "collect" the personal model, or "forget" all that is kept of a run."""

        def answer(download: Download) -> Callable[[dict[str, Scalar]], RecordDict]:
            upload = {"collect": self._collect, "forget": self._forget}.get(download.task, self._train)(download)
            return lambda told: wire.encode_upload(dataclasses.replace(upload, metrics={**upload.metrics, **told}))

        return self._attempt("fit", answer, content)

    def _evaluation_reply(self, content: RecordDict) -> RecordDict:
        """Evaluate the personalized model, after `finetune-epochs` again, and with `evaluate-global` the global model."""

        def answer(download: Download) -> Callable[[dict[str, Scalar]], RecordDict]:
            metrics = self._evaluate(download)
            loss, count = float(metrics.pop("loss")), self._reported_count(self.data.num_test)
            return lambda told: wire.evaluate_reply(loss, count, {**metrics, **told})

        return self._attempt("evaluate", answer, content)

    def _attempt(
        self, kind: Kind, answer: Callable[[Download], Callable[[dict[str, Scalar]], RecordDict]], content: RecordDict
    ) -> RecordDict:
        """Return the reply to a message: what `answer` makes of further entries for it, or the reason of a failure.

        Lines printed inside have this client's number. In the caller's process they are shown at once. In a simulation
        they travel, and the server shows them. A site's prints and traceback stay in its log.
        """
        lines: list[str] = []

        def show(line: str) -> None:
            debugging.show_printed(f"client {self.client_id}", line)

        def printed() -> dict[str, Scalar]:
            return {wire.PRINTED: debugging.cut(lines)} if lines else {}

        say = show if self.place is Place.IN_PROCESS else lines.append
        try:
            with nullcontext() if self.place is Place.DEPLOYMENT else debugging.printed_lines(say):
                found = answer(self._decoded(content, kind))
            reply = found(printed())
            # for the next client of this process; a task that failed leaves no network
            if self._used is not None:
                network, trainer = self._used
                self.session.refuse_written(trainer.flat)
                if trainer.lane is None:
                    self.session.leave(network, trainer.flat)
                elif not trainer.flat.is_restorable:
                    trainer.lane.kept.clear()
            return reply
        except Exception as error:
            told = refused(self.client_id, error, self.place)
            if self.place is not Place.DEPLOYMENT and (trace := debugging.trace_to_show(error)):
                told[wire.TRACEBACK] = debugging.cut([trace])
            return wire.failed_reply(kind, told | printed())

    def _decoded(self, content: RecordDict, kind: Kind) -> Download:
        """Return a message. From here on the client's data have the columns that it names, in their order."""
        download = self._download = wire.decode_download(content, kind)
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
                with reasons.stage("protocol", "private", "hidden"):
                    if not (self.config.initial_weights or self.config.from_run):
                        raise UserError(
                            key="private", rule="the server names a model's columns, and the run starts from no model"
                        )
                    self._site_keys.require_start(download.experiment, str(text))
            features = tuple(json.loads(str(text))["features"])
            # other names are refused before the model is used
            if sorted(features) == sorted(self.data.info.facts.features):
                self.data = self.data.with_columns(features)
        return download

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
            # Else the server of a private run would learn by its models, and by sizes of batches, which of them the
            # records make fail. The failure shows as one bit at the run's end.
            told = self.config.report_accuracy or reasons.of(error).code in ("budget", "capability")
            if told or not masker or not (self.place is Place.DEPLOYMENT or isinstance(error, Diverged)):
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
            reported = self._reported({**before, LOSS.name: train_loss, **after}, trainer)
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
            budget = trainer.budget
            spent = {
                EPSILON: trainer.epsilon,
                REPLACE_EPSILON: budget.replace_epsilon(),
                "dp-noise": trainer.plan.noise,
            }
            if self.place is Place.DEPLOYMENT:
                # What a site has spent and its noise follow from its number of records, so they stay in its log.
                text = ", ".join(f"{name} {value:.4g}" for name, value in spent.items())
                log.info("client %d: %s", self.client_id, text)
                spent = {EPSILON: budget.limit}
            metrics |= spent
        metrics |= self._fallback
        metrics |= {f"seconds-{phase}": seconds for phase, seconds in watch.laps.items()}
        if upload.metrics:
            metrics |= self._own(upload.metrics, trainer)
        metrics |= self._failed_metrics(trainer)
        return Upload(upload.model, upload.mask, upload.extras, metrics, self._reported_count(ctx.num_samples))

    # Other tasks

    def _properties(self) -> dict[str, Scalar]:
        config = self.config
        unknown = self.place is Place.DEPLOYMENT and source_of(config.dataset).known is None
        if unknown and config.is_confidential and not config.classes and tasks.of(config).has_classes:
            raise UserError(
                "classes: a run that is private or has a privacy budget must declare the names of the classes; they would show "
                "which labels a site has",
                code="configuration",
                key="classes",
                rule="declared",
            )
        with reasons.stage("data", "dataset", "readable"):
            self.session.prepare_changed_data(self.data_path)
        if self.config.device.startswith("cuda"):
            from client_app.trainer import resolve_device

            with reasons.stage("capability", "device", "available"):
                resolve_device(self.config.device)
        with reasons.stage("capability", "task", "installed"):
            tasks.require_packages(self.config)
        with reasons.stage("capability", "initial-weights", "available"):
            self.session.require_weights()
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
        info = self.data.info
        properties: dict[str, Scalar] = {
            "client-id": self.client_id,
            "num-clients": self.config.num_clients,
            "train-samples": self._reported_count(self.data.num_train),
            "test-samples": self._reported_count(self.data.num_test),
            "in-channels": info.in_channels,
            "image-size": info.image_size,
            "num-classes": info.num_classes,
            **self._data_hashes(),
            SOFTWARE: json.dumps({**software.announced(), software.WIRE: wire.WIRE_VERSION}),
        }
        # samples that are no square images
        if info.shape:
            properties["input-shape"] = ",".join(map(str, info.shape))
        # readers of a model's outputs need the names
        if config.report_class_counts or source_of(config.dataset).tells_classes:
            properties["class-names"] = json.dumps(info.classes)
        if config.report_class_counts and not config.is_confidential and tasks.of(config).has_classes:
            counts = np.bincount(self.data.y_train, minlength=info.num_classes)
            properties["class-counts"] = ",".join(map(str, counts))
        names = client_names(self.config, info)
        if (name := names[self.client_id] if names else self.name) and not self.config.is_confidential:
            properties[CLIENT_NAME] = name
        own_data = self.config.dataset == NODE
        if (text := self._input_facts()) and len(text) <= wire.MAX_TEXT:
            properties[INPUT] = text
        if (own_data or self.config.initial_weights or self.config.from_run) and not self.config.private:
            properties[FEATURES] = json.dumps(info.facts.features)
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
                properties[FEATURE_TAGS] = private_round.tags(keys, json.dumps([info.facts.features, info.classes]))
        return properties

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

        Raises UserError if the server does not send them, or if the model that a private run starts from has features of
        other names, or other classes. There only the client can compare them, and the error must not contain its own names.
        """
        data, info, config = self.data, self.data.info, self.config
        if (text := download.method.get(MODEL_NAMES)) is not None:
            mine, told = ModelNames.of(info), json.loads(str(text))
            for what, ours in (("features", mine.features), ("classes", mine.outputs)):
                with reasons.stage("protocol", "initial-weights", "same-model"):
                    if differ(told[what], ours):
                        key = "initial-weights" if config.initial_weights else "from"
                        raise UserError(key=key, rule=f"the {what} of the model have other names than this client's")
        by_model = config.normalizes_by_initial
        if not by_model and not self._needs_agreement:
            return data
        if by_model and (how := tasks.normalization(config, data.x_train.dtype)) != "mean-std":
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
        return dataclasses.replace(data, info=dataclasses.replace(info, mean=own.mean, std=own.std))

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
            update = self.method.local_update()
            start = update.merge(download.model, state, ctx)
            model = update.personal(start, state, ctx)
            measured = self._measured(model, trainer)
            if self.config.evaluate_global:
                received = update.global_model(download.model, state, ctx)
                measured |= self._measured(received, trainer, GLOBAL.removeprefix("-"), losses=False)
            if self.config.finetune_epochs:
                trainer.begin_finetuning()
                tuned = update.finetune(model, state, ctx, self.config.finetune_epochs)
                measured |= self._measured(tuned, trainer, FINETUNED.removeprefix("-"), losses=False)
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
            who = self.client_id, self.name
            kept_model.keep(self.config, experiment, download.round, *who, data, layout, model, measured)
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
        if self.config.private:
            told[wire.CLIPPED] = self._site_keys.forget(download.experiment)
        if not self.config.keep_state:
            self._store.forget()
            self._notes.forget()
        return Upload(download.model, metrics=told)

    # A task's data and state, and the model in a trainer

    @cached_property
    def data(self) -> ClientData:
        """This client's part of the data. Raises UserError if they would lie in the site's own directory."""
        if self.config.data_dir:
            with reasons.stage("deployment", "data-dir", "outside"):
                refuse_within_site("data-dir", data_root(self.config))
        with reasons.stage("data", "dataset", "readable"):
            return self.session.opened(self.data_path).client(self.client_id)

    def _prepare(self, download: Download) -> tuple[RoundContext[Any], StoredState, Any]:
        """Load the state and build the run's model. Return the method's context, the state and the trainer.

        Raises UserError if the download is of another model, or if the state was trained without a privacy budget.
        """
        prepare_training(self.config.client_threads)
        from client_app.trainer import LocalTrainer

        config, method, session = self.config, self.method, self.session
        if (drops := download.method.get(wire.DROPS)) is not None:
            config = dataclasses.replace(config, drops=max(0, int(drops)))
        state = self._state_of(download)
        weights_file = session.weights_file
        data, lane = self.data, at_once.current()
        with reasons.stage("capability", "model", "available"):
            # opacus leaves its marks on a network
            if lane is None or config.dp_epsilon:
                network = session.network(data.info, weights_file)
            else:
                # the previous client's, to be set by `load`
                stamp = stamps_of(Path(weights_file)) if weights_file else None
                name = ("network", tuple(sorted(data.info.model_arguments.items())), weights_file, stamp)
                network = lane.keep(name, lambda: session.network(data.info, weights_file))
        with reasons.stage("protocol", "model", "same-model"):
            held = method.submodel
            part = None if held is None else held.sent_part(network.shared_layout, download.extras)
            check_same_model(download, network.layout, network.shared_layout, config.model, part)

        @functools.cache
        def initial() -> Model:
            start = network.initial()
            if config.initial_weights and not weights_file and method.local_from_file:
                start = session.initial(data.info, config.initial_weights, network.layout)
            # the method may write into it
            return Model(start.params.copy(), start.buffers.copy())

        trainer: Any = LocalTrainer(network.module, config, self._scaled(download), download.round, self.client_id)
        self._used = network, trainer
        if config.dp_epsilon:
            # Opacus takes seconds to import
            from client_app.dp import Budget, NoisyTrainer

            budget = Budget(self._notes, self.config)
            trainer = NoisyTrainer(trainer, budget=budget, epochs=method.dp_epochs_of(self.config))
        ctx = RoundContext(
            config=config,
            params=config.params,
            round=download.round,
            client_id=self.client_id,
            layout=network.layout,
            shared=network.shared,
            initial=initial,
            trainer=trainer,
            num_samples=data.num_train,
            extras=download.extras,
        )
        return ctx, state, trainer

    def _state_of(self, download: Download) -> StoredState:
        """Return the client's state: of this run, of the run that it goes on from, which stays where it is, or none.

        Raises UserError if it is missing or damaged. In a private run it is too if only an older state than that of the
        client's aggregation group is left: the server may know how to bring one about, and then knows more of the upload.
        """
        version, text = download.state_version, download.method.get(wire.STATE_OF)
        if not version and text is None:
            return StoredState()
        with reasons.stage("deployment", "state-dir", "state"):
            store = self._store
            if not version:
                told = json.loads(str(text))
                version, experiment = str(told["version"]), experiment_of(str(told["secret"]))
                store = StateStore(store.root, experiment, int(told["client"]), store.noisy)
            state = store.load(version)
            if state.version != version and self.config.private and self.config.private_left_out == "group":
                raise UserError(key="private", rule=f"the state {version} is missing or damaged")
        if not download.state_version:
            return StoredState(state.arrays)
        if state.version != version:
            self._fallback = {wire.STATE_USED: state.version}
        return state

    @cached_property
    def _store(self) -> StateStore:
        """The client's state of the message's experiment. Raises UserError if it would lie in the site's own directory."""
        root, experiment = state_root(self.config.state_dir), self._download.experiment
        store = StateStore(root, experiment, self.client_id, self.config.dp_epsilon > 0)
        # the SuperNode checks the machine's own settings when it starts
        if self.config.state_dir:
            with reasons.stage("deployment", "state-dir", "outside"):
                refuse_within_site("state-dir", store.directory)
        return store

    @cached_property
    def _notes(self) -> Notes:
        """The site's notes on the client in the message's experiment."""
        simulated = self.keys == wire.SEED_KEYS
        own = self._own_data() if self.config.dp_epsilon and not simulated else None
        return Notes(site_directory(), self._download.experiment, self.client_id, self.run, simulated, own)

    def _own_data(self) -> OwnData | None:
        """Return the site's records that this client trains on, or None if they come with a Python package."""
        with reasons.stage("data", "dataset", "readable"):
            return OwnData.of(self.session.opened(self.data_path), self.data_path, self.client_id)

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
        """Write what the client keeps, and return its version, "" if it keeps nothing."""
        # a repeated round would start from it again
        version, read_from = "", state.version
        if state.arrays:
            hooks.check_kept(self.config.method, "state.arrays", state.arrays, converts=True)
            with reasons.stage("deployment", "state-dir", "writable"):
                version = self._store.save(state, download.round, download.attempt)
        if read_from:
            self._store.delete_before(read_from, download.keep)
        return version

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
            own=frozenset(metric.name for metric in self.method.recorded),
            known={"class-names": json.dumps(classes)} if classes else {},
        )

    # Figures for the server

    def _measured(self, model: Model, trainer: Any, moment: str = "", losses: bool = True) -> dict[str, float]:
        """Return a model's losses and metrics on test and validation data, by their names in records.

        moment: `before` or `after` training, `finetuned` or `global`; empty for an evaluation. losses: whether to return
        losses.
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
            if losses:
                values[LOSS.name] = loss
            for name, value in values.items():
                found[f"{word}{name}{end}"] = value
        return found

    def _reported(self, measured: Mapping[str, float], trainer: Any) -> dict[str, Scalar]:
        """Return losses and metrics in the form that the server gets: all NaN with `report-accuracy = false`.

        Raises UserError if they show that training diverged: one is larger than the server accepts, or the loss after
        training is infinite, or NaN after a number before. The first of these is named: metrics before the training loss,
        and that before other losses.
        """
        if not self.config.report_accuracy:
            return dict.fromkeys(measured, math.nan)
        wrong = [name for name, value in measured.items() if MAX_NUMBER < abs(value) < math.inf]
        if wrong:
            wrong.sort(key=lambda name: 0 if not _is_loss(name) else 1 if name == LOSS.name else 2)
        after = measured.get("loss-after", 0.0)
        if after == math.inf or math.isnan(after) and not math.isnan(measured["loss-before"]):
            wrong.append("loss-after")
        if wrong:
            raise diverged(wrong[0], measured[wrong[0]], trainer.learning_rate)
        reported: dict[str, Scalar] = dict(measured)
        for name, value in measured.items():
            # rounding may leave a loss just below 0
            if -ROUNDING <= value < 0 and _is_loss(name):
                reported[name] = 0.0
        return reported

    def _own(self, reported: Mapping[str, Scalar], trainer: Any) -> dict[str, Scalar]:
        """Return a method's own metrics, clipped to their ranges.

        One beyond its range becomes NaN, and the trainer's `metric_errors` gets the reason.
        """
        own = dict(reported)
        for metric in self.method.recorded:
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

    def _reported_count(self, samples: int) -> int:
        """Return a number of samples in the form that the server gets: 1 where it need not know it."""
        return samples if self.session.reports_counts else 1

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
        config = self.config
        if not config.report_accuracy:
            return error
        # a loss or parameter that training on a client's own data neither reaches nor recovers from
        beyond = not (np.abs(model.params).max(initial=0) < DIVERGED_PARAMETER and np.isfinite(model.buffers).all())
        if not isinstance(error, Diverged) and beyond:
            error = Diverged(f"{DIVERGED}: {debugging.reason(error)} (learning-rate {trainer.learning_rate:g})")
        if isinstance(error, Diverged):
            rates = {name: value for name, value in vars(config.params).items() if name.endswith("_rate")}
            own = "".join(f", {config.method}.{name.replace('_', '-')} {value:g}" for name, value in rates.items())
            # the ranges of data under privacy are the site's business
            far = [] if config.is_confidential else far_values(self.data, config)
            error = Diverged("; ".join([f"{error}{own}", *far]))
        if not isinstance(error, UserError) or not len(self.data.y_test) or loss_before < DIVERGED_LOSS:
            return error
        return Diverged(f"{error}; the model it was sent had a loss of {loss_before:.3g} already")


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
    if (params, buffers) not in ((0, 0), (d, b)):
        raise UserError(
            f"received {params} parameters and {buffers} buffer elements, this "
            f"client's model {model} shares {d} and {b}: is it the server's model?"
        )
