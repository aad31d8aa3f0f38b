"""A client process's memory between the messages of a run: config, method, opened data, facts of the model.

A process of a simulation answers for many clients. A process of a deployment answers one message, and gains nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fl_app import plugins, tasks
from fl_app.checksums import DataHashes, stamp_of
from fl_app.config import RunConfig, parse
from fl_app.data import ClientData, DatasetInfo, OpenedData, check_client_id, open_data
from fl_app.errors import ConfigurationError, UserError
from fl_app.keys import Scalar, own
from fl_app.layout import Layout, Model
from fl_app.metrics import Metric
from fl_app.model_names import ModelNames
from fl_app.site_directory import refuse_within_site
from fl_app.sources import NODE
from strategies import METHOD_PARAMS, METHODS
from strategies.base.method import AnyMethod

log = logging.getLogger("corolla")

# seconds between two looks at the files of opened data: with a dozen files a look takes 0.1 ms
LOOK_EVERY = 0.1

if TYPE_CHECKING:
    from torch import nn

    from client_app.flat import FlatModule


class ModelFacts(NamedTuple):
    """Facts common to all networks of a run: layout, names of the tensors that travel, their layout, initial values.

    initial: returns the initial values. Where every tensor travels it builds the network again, because few methods ask
    for them.
    """

    layout: Layout
    shared: frozenset[str]
    shared_layout: Layout
    initial: Callable[[], Model]


class Network(NamedTuple):
    """A run's network for one message. key: its origin. module: a module, or the vectors that a trainer made of it."""

    key: Hashable
    module: nn.Module | FlatModule
    facts: ModelFacts


class Session:
    """A run, in a process that answers its messages. method: the config's method, or a substitute."""

    def __init__(self, config: RunConfig, method: AnyMethod) -> None:
        self.config, self.method = config, method
        self._facts: dict[tuple[object, ...], ModelFacts] = {}
        # networks left by a message for the next one
        self._left: dict[Hashable, Network] = {}
        self._opened: dict[str, OpenedData] = {}
        # time of the last look at the files
        self._looked: dict[str, float] = {}
        self._refreshed: set[str] = set()
        # (key, directory, names below it) of directories outside the site's own
        self._outside: set[tuple[str, Path, tuple[str, ...]]] = set()
        # the network's fault for samples of a shape, "" for none
        self._checked: dict[tuple[int, ...], str] = {}

    @classmethod
    def of(cls, run_config: Mapping[str, Scalar], num_clients: int, run: int) -> Session:
        """Return the session of a run, the last one if it is the same.

        Raises UserError that names the fault of the config. run: its id. Two runs with one config share nothing,
        because files may have changed in between.
        """
        # as JSON: 1, 1.0 and true are three values
        return session_of(json.dumps(dict(run_config)), num_clients, run, plugins.generation())

    def data(self, client_id: int, data_path: str) -> ClientData:
        """Return a client's samples, from data already open unless their files have changed. Raises UserError."""
        check_client_id(self.config, client_id)
        return self.opened(data_path).client(client_id)

    def told_hashes(self, data_path: str) -> DataHashes | None:
        """Return the hashes by which the server recognises the data, or None if the site's key cannot be kept.

        They are keyed for a site's own data, in private runs, and in runs with a privacy budget.
        """
        opened, config = self.opened(data_path), self.config
        if config.dataset != NODE and not config.is_confidential:
            return opened.hashes
        try:
            return opened.hidden_hashes
        except OSError as error:
            log.warning(
                "the site's directory cannot keep a key (%s): a resumed run will not detect changed data", error
            )
            return None

    def opened(self, data_path: str) -> OpenedData:
        """Return the run's data, opened, or opened again if their files have changed. Raises UserError."""
        opened, now = self._opened.get(data_path), time.monotonic()
        if opened is not None and now < self._looked.get(data_path, -math.inf) + LOOK_EVERY:
            return opened
        if opened is None or not opened.unchanged:
            opened = self._opened[data_path] = open_data(self.config, data_path)
        self._looked[data_path] = now
        return opened

    def network(self, info: DatasetInfo, weights_file: str) -> Network:
        """Return the run's network: one passed to `leave`, else a new one.

        weights_file: the source of its initial values; "" means the seed. A network passed to `leave` has its last
        values, which `load` replaces. Raises UserError for a network that the method cannot use.
        """
        # taken before the file is read, so that a change in between is noticed the next time
        stamp = stamp_of(Path(weights_file)) if weights_file else None
        names = ModelNames.of(info) if weights_file else None
        key = tuple(sorted(info.model_arguments.items())), weights_file, stamp, names
        if (left := self._left.pop(key, None)) is not None:
            return left
        module = self._built(info, weights_file)
        layout = Layout.of(module)
        known = layout, weights_file, stamp, names
        if known not in self._facts:
            shared = self.method.travelling(self.config, layout)
            self._facts[known] = ModelFacts(
                layout, shared, layout.subset(shared), self._initial(module, layout.names > shared, info, weights_file)
            )
        return Network(key, module, self._facts[known])

    def initial(self, info: DatasetInfo, weights_file: str, layout: Layout) -> Model:
        """Return the values that a file gives a network of this layout. Raises UserError if the file does not fit."""
        stamp = stamp_of(Path(weights_file))
        known = layout, weights_file, stamp, ModelNames.of(info)
        facts = self._facts.get(known) or self.network(info, weights_file).facts
        return facts.initial()

    def leave(self, network: Network, flat: FlatModule) -> None:
        """Keep a message's network, as vectors, for the next message, if `FlatModule.reset` can restore all of it.

        With differential privacy none is kept, because it leaves marks on a network. Raises UserError if something has
        written into a frozen tensor (the key `train`).
        """
        if name := flat.written_constant():
            rule = "frozen tensors must stay as they are, and something has written into this one"
            raise ConfigurationError(key="train", rule=rule, value=name)
        if not self.config.dp_epsilon and flat.is_restorable:
            self._left = {network.key: network._replace(module=flat)}

    @functools.cached_property
    def measured(self) -> tuple[str, ...]:
        """Names of the metrics that clients measure, the headline's first."""
        return tuple(metric.name for metric in tasks.measured(self.config))

    @functools.cached_property
    def reports(self) -> tuple[Metric, ...]:
        """The method's own metrics."""
        return self.method.recorded

    def _built(self, info: DatasetInfo, weights_file: str) -> nn.Module:
        names = ModelNames.of(info)
        return self.method.network(
            self.config, **info.model_arguments, initial_weights=weights_file, names=names, tried=True
        )

    def _initial(self, module: nn.Module, asked: bool, info: DatasetInfo, weights_file: str) -> Callable[[], Model]:
        """Return a function that gives a new network's values. asked: whether the values will be needed in any case."""
        from fl_app import weights

        if asked:
            values = weights.read(module)
            return lambda: values
        return functools.cache(lambda: weights.read(self._built(info, weights_file)))

    def check_once(self, check: Callable[[nn.Module, RunConfig, tuple[int, ...]], None], info: DatasetInfo) -> None:
        """Check the run's network for samples of some data, at a client's first request. Raises UserError each time."""
        if info.input_shape not in self._checked:
            try:
                module = self._built(info, "")
                self.method.travelling(self.config, Layout.of(module))
                check(module, self.config, info.input_shape)
                self._checked[info.input_shape] = ""
            except UserError as error:
                self._checked[info.input_shape] = str(error)
        if why := self._checked[info.input_shape]:
            raise UserError(why)

    def refuse_within_site(self, key: str, directory: Path, *below: str) -> None:
        """Raise UserError if a directory lies in the site's own. One that does not is checked only once.

        below: names that lead from `directory` to the directory meant.
        """
        if (key, directory, below) not in self._outside:
            refuse_within_site(key, directory.joinpath(*below))
            self._outside.add((key, directory, below))

    def prepare_changed_data(self, data_path: str) -> None:
        """Prepare the data again, once, if their source files have changed. Raises UserError."""
        if data_path not in self._refreshed:
            self._opened[data_path] = open_data(self.config, data_path, look=True)
            self._refreshed.add(data_path)


@functools.lru_cache(maxsize=1)
def session_of(run_config: str, num_clients: int, run: int, plugins_generation: int) -> Session:
    """Return the session of a run in this process. run_config: as JSON. plugins_generation: another one makes a new session."""
    raw: dict[str, Scalar] = json.loads(run_config)
    plugins.read(str(raw.get("plugins", "")))
    method = str(raw.get("method", RunConfig.method))
    config = parse(own(raw, method), METHOD_PARAMS.of(method))
    # the run's number: a site's own is of the day on which it was invited
    return Session(dataclasses.replace(config, num_clients=config.num_clients or num_clients), METHODS[method])
