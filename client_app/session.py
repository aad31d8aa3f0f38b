"""What a client process keeps from one message of a run to the next: config, method, opened data, facts of the model.

A process of a simulation answers for many clients. A process of a deployment answers one message, and gains nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fl_app import plugins
from fl_app.checksums import DataHashes, stamp_of
from fl_app.config import RunConfig, parse
from fl_app.data import ClientData, DatasetInfo, OpenedData, check_client_id, open_data
from fl_app.errors import UserError
from fl_app.keys import Scalar, own
from fl_app.layout import Layout, Model
from fl_app.sources import NODE
from strategies import METHOD_PARAMS, METHODS
from strategies.base.method import AnyMethod

log = logging.getLogger("corolla")

if TYPE_CHECKING:
    from torch import nn


class ModelFacts(NamedTuple):
    """What is the same of all networks of a run: layout, initial values, names of the tensors that travel, their layout."""

    layout: Layout
    initial: Model
    shared: frozenset[str]
    shared_layout: Layout


class Session:
    """A run, in a process that answers its messages. method: of its config, or what takes its place."""

    def __init__(self, config: RunConfig, method: AnyMethod) -> None:
        self.config, self.method = config, method
        self._facts: dict[tuple[object, ...], ModelFacts] = {}
        self._opened: dict[str, OpenedData] = {}
        self._refreshed: set[str] = set()
        # what is wrong with the network for samples of a shape, "" if nothing
        self._checked: dict[tuple[int, ...], str] = {}

    @classmethod
    def of(cls, run_config: Mapping[str, Scalar], num_clients: int, run: int) -> Session:
        """Return the session of a run, the last one if it is the same. Raises UserError naming what is wrong with the config.

        run: its id. Two runs of one config share nothing: files may have changed in between.
        """
        # as JSON: 1, 1.0 and true are three values
        return _session(json.dumps(dict(run_config)), num_clients, run, plugins.generation())

    def data(self, client_id: int, data_path: str) -> ClientData:
        """Open a client's samples: from what is open already, unless files of it have changed. Raises UserError."""
        check_client_id(self.config, client_id)
        return self._open(data_path).client(client_id)

    def hashes(self, data_path: str) -> DataHashes:
        """Return the hashes of the opened data, which stay here."""
        return self._open(data_path).hashes

    def told_hashes(self, data_path: str) -> DataHashes | None:
        """Return what the server may tell the opened data from others by; None if the site's key cannot be kept.

        A site's own data, and data of private runs and of runs with a budget of privacy, have keyed hashes.
        """
        opened, config = self._open(data_path), self.config
        if config.dataset != NODE and not config.private and not config.dp_epsilon:
            return opened.hashes
        try:
            return opened.hidden_hashes
        except OSError as error:
            log.warning("the site's directory cannot keep a key (%s): a resumed run will not notice other data", error)
            return None

    def _open(self, data_path: str) -> OpenedData:
        opened = self._opened.get(data_path)
        if opened is None or not opened.unchanged:
            opened = self._opened[data_path] = open_data(self.config, data_path)
        return opened

    def network(self, info: DatasetInfo, weights_file: str) -> tuple[nn.Module, ModelFacts]:
        """Build the run's network, and return it with its facts. weights_file: gives its initial values; "": the seed does.

        Raises UserError for a network that the method cannot be used with.
        """
        from fl_app import weights

        # before the file is read: one that changes in between is another the next time
        stamp = stamp_of(Path(weights_file)) if weights_file else None
        module = self.method.network(self.config, **info.model_arguments, initial_weights=weights_file)
        layout = Layout.of(module)
        key = layout, weights_file, stamp
        if key not in self._facts:
            shared = self.method.travelling(self.config, layout)
            self._facts[key] = ModelFacts(layout, weights.read(module), shared, layout.subset(shared))
        return module, self._facts[key]

    def check_once(self, check: Callable[[nn.Module, RunConfig, tuple[int, ...]], None], info: DatasetInfo) -> None:
        """Check the run's network for samples of some data, the first time that a client asks. Raises UserError each time."""
        if info.input_shape not in self._checked:
            try:
                check(self.network(info, "")[0], self.config, info.input_shape)
                self._checked[info.input_shape] = ""
            except UserError as error:
                self._checked[info.input_shape] = str(error)
        if why := self._checked[info.input_shape]:
            raise UserError(why)

    def prepare_changed_data(self, data_path: str) -> None:
        """Prepare the data again, once, if the files they were made of have changed. Raises UserError."""
        if data_path not in self._refreshed:
            self._opened[data_path] = open_data(self.config, data_path, look=True)
            self._refreshed.add(data_path)


@functools.lru_cache(maxsize=1)
def _session(run_config: str, num_clients: int, run: int, plugins_generation: int) -> Session:
    raw: dict[str, Scalar] = json.loads(run_config)
    plugins.read(str(raw.get("plugins", "")))
    method = str(raw.get("method", RunConfig.method))
    config = parse(own(raw, method), METHOD_PARAMS.of(method))
    return Session(dataclasses.replace(config, num_clients=num_clients), METHODS[method])
