"""A client process's memory between the messages of a run: config, method, opened data, facts of the model.

A process of a simulation answers for many clients. A process of a deployment answers one message, and gains nothing. At the
end of this file is what prepares a process: it imports torch quickly, limits threads, and keeps freed memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fl_app import plugins, tasks
from fl_app.checksums import DataHashes
from fl_app.config import RunConfig, parse
from fl_app.data import DatasetInfo, OpenedData, open_data
from fl_app.errors import ConfigurationError
from fl_app.keys import Scalar, own
from fl_app.layout import Layout, Model
from fl_app.model_names import ModelNames
from fl_app.sources import NODE
from fl_app.weight_files import INITIAL_WEIGHTS, at_site, refuse_missing, stamps_of
from strategies import METHOD_PARAMS, METHODS
from strategies.base.method import AnyMethod

log = logging.getLogger("corolla")

# seconds between two looks at the files of opened data: with a dozen files a look takes 0.1 ms
LOOK_EVERY = 0.1
# glibc's allocator maps blocks of at least MMAP_THRESHOLD_BYTES separately, and keeps up to TRIM_THRESHOLD_BYTES of
# free memory on the heap.
MMAP_THRESHOLD_BYTES = 64 << 20
TRIM_THRESHOLD_BYTES = 256 << 20
# parameters of mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

if TYPE_CHECKING:
    from torch import nn

    from client_app.flat import FlatModule


class Network(NamedTuple):
    """A run's network for one message, and the facts common to all networks of the run.

    key: its origin. module: a module, or a trainer's, which holds it as vectors. shared: names of the tensors that travel,
    and `shared_layout` their layout. initial: returns the initial values. Where every tensor travels it builds the network
    again, because few methods ask for them.
    """

    key: Hashable
    module: nn.Module | FlatModule
    layout: Layout
    shared: frozenset[str]
    shared_layout: Layout
    initial: Callable[[], Model]


class Session:
    """A run, in a process that answers its messages. method: the config's method, or a substitute."""

    def __init__(self, config: RunConfig, method: AnyMethod) -> None:
        self.config, self.method = config, method
        self._known: dict[tuple[object, ...], tuple[frozenset[str], Layout, Callable[[], Model]]] = {}
        # networks left by a message for the next one
        self._left: dict[Hashable, Network] = {}
        self._opened: dict[str, OpenedData] = {}
        # time of the last look at the files
        self._looked: dict[str, float] = {}
        self._refreshed: set[str] = set()
        # shapes of samples for which the network was checked
        self._checked: set[tuple[int, ...]] = set()
        self._has_weights = False

    @classmethod
    def of(cls, run_config: Mapping[str, Scalar], num_clients: int, run: int) -> Session:
        """Return the session of a run, the last one if it is the same.

        Raises UserError that names the fault of the config. run: its id. Two runs with one config share nothing,
        because files may have changed in between.
        """
        # as JSON: 1, 1.0 and true are three values
        return session_of(json.dumps(dict(run_config)), num_clients, run, plugins.generation())

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
        stamp = stamps_of(Path(weights_file)) if weights_file else None
        names = ModelNames.of(info) if weights_file else None
        key = tuple(sorted(info.model_arguments.items())), weights_file, stamp, names
        if (left := self._left.pop(key, None)) is not None:
            return left
        module = self._built(info, weights_file)
        layout = Layout.of(module)
        known = layout, weights_file, stamp, names
        if known not in self._known:
            from fl_app import weights

            shared = self.method.travelling(self.config, layout)
            values = weights.read(module) if layout.names > shared else None
            initial = functools.cache(lambda: values or weights.read(self._built(info, weights_file)))
            self._known[known] = shared, layout.subset(shared), initial
        return Network(key, module, layout, *self._known[known])

    def initial(self, info: DatasetInfo, weights_file: str, layout: Layout) -> Model:
        """Return the values that a file gives a network of this layout. Raises UserError if the file does not fit."""
        known = layout, weights_file, stamps_of(Path(weights_file)), ModelNames.of(info)
        *_, values = self._known.get(known) or self.network(info, weights_file)
        return values()

    def leave(self, network: Network, flat: FlatModule) -> None:
        """Keep a message's network, as vectors, for the next message, if `FlatModule.reset` can restore all of it.

        With differential privacy none is kept, because it leaves marks on a network.
        """
        if not self.config.dp_epsilon and flat.is_restorable:
            self._left = {network.key: network._replace(module=flat)}

    @staticmethod
    def refuse_written(flat: FlatModule) -> None:
        """Raise UserError if something has written into a frozen tensor (the key `train`)."""
        if name := flat.written_constant():
            rule = "frozen tensors must stay as they are, and something has written into this one"
            raise ConfigurationError(key="train", rule=rule, value=name)

    @property
    def weights_file(self) -> str:
        """File with the first values of tensors that the server does not send, "" if it sends all or they come from the seed."""
        return self.config.initial_weights if self.config.train or self.config.share else ""

    def require_weights(self) -> None:
        """Raise UserError, at a client's first request, if the file of `weights_file` or one of its shards is missing."""
        if self.weights_file and not self._has_weights:
            refuse_missing(Path(self.weights_file), INITIAL_WEIGHTS)
            self._has_weights = True

    @functools.cached_property
    def measured(self) -> tuple[str, ...]:
        """Names of the metrics that clients measure, the headline's first."""
        return tuple(metric.name for metric in tasks.measured(self.config))

    @functools.cached_property
    def reports_counts(self) -> bool:
        """Whether the server learns the clients' numbers of samples."""
        return self.method.reports_counts(self.config)

    def _built(self, info: DatasetInfo, weights_file: str) -> nn.Module:
        names = ModelNames.of(info)
        return self.method.network(
            self.config, **info.model_arguments, initial_weights=weights_file, names=names, tried=True
        )

    def check_once(self, check: Callable[[nn.Module, RunConfig, tuple[int, ...]], None], info: DatasetInfo) -> None:
        """Check the run's network for samples of some data, at a client's first request. Raises UserError."""
        if info.input_shape not in self._checked:
            module = self._built(info, "")
            self.method.travelling(self.config, Layout.of(module))
            check(module, self.config, info.input_shape)
            self._checked.add(info.input_shape)

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
    clients, weights = config.num_clients or num_clients, at_site(config.initial_weights)
    return Session(dataclasses.replace(config, num_clients=clients, initial_weights=weights), METHODS[method])


# The process


def import_torch() -> None:
    """Import torch without the garbage collector: its passes take a fifth of the import's time.

    They would free nothing. In a deployment every message pays for the import.
    """
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        import torch  # noqa: F401

        # later passes of the collector skip the import's objects
        gc.freeze()
    finally:
        gc.enable()


def prepare_training(threads: int) -> None:
    """Set up this process for training: torch, its number of threads, and the allocator. The settings stay."""
    import_torch()
    import torch

    torch.set_num_threads(threads)
    keep_freed_memory()


@functools.cache
def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed memory, up to 256 MB, for the next batch. Return whether it does.

    By default it returns a batch's activations to the kernel, and faults them in again for the next batch. This costs a
    tenth to a fifth of the training time on a CPU. Without glibc, or where the environment configures the allocator,
    nothing changes.
    """
    by_variable = any(name.startswith("MALLOC_") for name in os.environ)
    by_tunable = "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or by_variable or by_tunable:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
