"""The model that a site keeps of a run: a run folder of one client, from which `corolla node export` writes a file.

It lies in the site's own directory, `models/<experiment>-<client>/<run>`. Nothing in it comes from other sites, apart from the
parts of the model that travel, and from the sites' common scaling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fl_app import models, plugins, tasks
from fl_app.config import RunConfig
from fl_app.data import ClientData
from fl_app.data.site_columns import SiteColumns
from fl_app.files import make_directory, publish_text
from fl_app.keys import own
from fl_app.layout import Layout, Model
from fl_app.metrics import DIGEST_VERSION
from fl_app.model_names import ModelNames
from fl_app.server.run_folder import (
    CLIENTS,
    CONFIG,
    DATA,
    FROZEN,
    INITIAL,
    METRICS,
    MODELS,
    NAME,
    NORMALIZED_BY,
    PLUGINS,
    READ_BY,
    RUN,
    SHAPE,
    SUMMARY,
)
from fl_app.site_directory import site_directory
from fl_app.toml import to_toml
from fl_app.transport import wire
from fl_app.weights import save_safetensors


def keep(
    config: RunConfig,
    experiment: str,
    round: int,
    client_id: int,
    name: str,
    data: ClientData,
    layout: Layout,
    model: Model,
    measured: Mapping[str, float],
) -> None:
    """Write a client's model after a round, in place of that of an earlier one.

    name: the site's, "" if it has none. data: scaled as the model's inputs are. layout: of the network that trains. model: as
    clients export it; one of another network than that and the run's own model is not kept. measured: the client's figures.
    Raises OSError.
    """
    info, layouts = data.info, [layout]
    if (layout.d, layout.b) != (model.params.size, model.buffers.size):
        module = models.build(
            config.model, **info.model_arguments, norm=config.norm, classifier=config.classifier, tried=True
        )
        layouts = [Layout.of(module)]
    if (layouts[0].d, layouts[0].b) != (model.params.size, model.buffers.size):
        return
    hashes = wire.hashes(model)
    digest, headline = hashes[wire.SHA256], tasks.of(config).metrics[0].name
    clients = {str(client_id): {**measured, **hashes}}
    evaluation = {"clients": clients, "digest": digest, "digest-version": DIGEST_VERSION, **measured}
    about = {
        "experiment": experiment,
        "figures": [],
        "metrics": [metric.declared for metric in tasks.measured(config)],
        "classes": info.classes,
        SHAPE: info.model_arguments,
        FROZEN: layouts[0].constants,
        **({INITIAL: ModelNames.of(info)._asdict()} if config.initial_weights else {}),
        DATA: {
            NORMALIZED_BY: info.scaling,
            READ_BY: {
                "dtype": str(data.x_train.dtype),
                **info.columns_facts(),
                **SiteColumns.of_environment().recorded,
            },
        },
    }
    facts = {"train-samples": data.num_train, "test-samples": data.num_test, **({NAME: name} if name else {})}
    summary = {
        "experiment": experiment,
        "digest": digest,
        "digest-version": DIGEST_VERSION,
        "rounds": round,
        "num-clients": config.num_clients,
        f"final-{headline}": measured.get(headline),
    }
    folder = directory(experiment, client_id) / (config.run_name or experiment)
    make_directory(folder / MODELS)
    plugins.write(plugins.read(config.plugins), folder / PLUGINS)
    save_safetensors(folder / MODELS / f"client-{client_id}.safetensors", layouts[0], model)
    publish_text(folder / CONFIG, to_toml(own({**config.resolved, "resume": "", "from-run": ""}, config.method)))
    publish_text(folder / CLIENTS, json.dumps({str(client_id): facts}) + "\n")
    publish_text(folder / METRICS, json.dumps({"round": round, "clients": {}, "evaluation": evaluation}) + "\n")
    publish_text(folder / RUN, json.dumps(about) + "\n")
    publish_text(folder / SUMMARY, json.dumps(summary) + "\n")


def directory(experiment: str, client_id: int) -> Path:
    """Return the directory of a client's model in the site's own."""
    return site_directory() / MODELS / f"{experiment}-{client_id}"
