"""What can be wrong with a run on this machine, and what is odd about it, before it starts."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from corolla.api.console import console, warn
from corolla.api.waiting import waiting
from fl_app import extras
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.files import refuse_unwritable
from fl_app.keys import bears_on
from fl_app.server.run_folder import check_data
from fl_app.sources import NODE
from strategies import METHODS
from strategies.robust import ABLE

if TYPE_CHECKING:
    from fl_app.data import DatasetInfo


def check_locally(config: RunConfig) -> None:
    """Everything that can be wrong on this machine, before a simulation starts: data, partition, model, device."""
    from fl_app import data, tasks
    from fl_app.layout import Layout
    from fl_app.server import trackers

    trackers.require(config.resolved)
    if config.dataset == NODE:
        raise UserError(
            "dataset: node is for deployments, where every SuperNode has its own data-path; got a simulation"
        )
    method = METHODS[config.method]
    method.check(config)
    tasks.require_packages(config)
    if config.dp_epsilon:
        extras.require("opacus", "dp-epsilon")
    with waiting(console) as shown:
        shown.step("checking the data and the model", brief=True)
        # here, for torch takes seconds
        from client_app.device_model import resolve_device

        resolve_device(config.device)
        if config.state_dir:
            refuse_unwritable("state-dir", Path(config.state_dir))
        info = data.check(config)
        if config.resume:
            check_data(Path(config.resume), data.open_data(config).hashes)
        remarks = data.partition_remarks(config, brief=True)
        if config.augment != "none" and (len(info.input_shape) != 3 or info.input_shape[1] != info.input_shape[2]):
            raise UserError(
                f"augment: {config.augment} needs square images, a sample has shape {list(info.input_shape)}"
            )
        module = method.network(config, **info.model_arguments, initial_weights=config.initial_weights)
        method.travelling(config, Layout.of(module))
        if config.dp_epsilon:
            from client_app.dp import check_module

            check_module(module, config, info.input_shape)
    warn_of_data(info)
    for line in remarks:
        warn(line)


def check_resources(cpus_per_client: float, gpus_per_client: float) -> None:
    """Refuse what Ray would wait for forever. Raises UserError naming the option."""
    cores = os.cpu_count() or 1
    if cpus_per_client > cores:
        raise UserError(f"--cpus-per-client: this machine has {cores} cores, got {cpus_per_client:g}")
    if gpus_per_client:
        import torch

        if gpus_per_client > torch.cuda.device_count():
            raise UserError(
                f"--gpus-per-client: this machine has {torch.cuda.device_count()} GPUs, got {gpus_per_client:g}"
            )


def warn_of_settings(given: Iterable[str], runs: Collection[tuple[RunConfig, Collection[str]]]) -> None:
    """Say on standard error which settings are not what they seem: nothing is refused.

    given: keys of --set, of which those in a table of a method that no run has are without effect. Keys of presets and files
    may be for several methods and are not named. runs: each with the keys that somebody chose for it; defaults are not named.
    """
    methods = {config.method for config, _ in runs}
    for key in given:
        if not any(bears_on(key, method) for method in methods):
            owner = key.rpartition(".")[0]
            warn(f"--set {key} has no effect: it is a key of method {owner}, not of {', '.join(sorted(methods))}")
    few = {
        f"robust = {config.robust} outvotes nobody among {asked} clients a round; from {ABLE} on it can"
        for config, _ in runs
        if config.robust != "none" and config.num_clients and (asked := config.drawn(config.num_training)) < ABLE
    }
    late = {
        f"{key.name} = {value} is above num-server-rounds = {config.num_server_rounds}: what begins after round {value} is "
        "never reached"
        for config, chosen in runs
        for key, value in config.own_keys()
        if key.counts_rounds and key.name in chosen and isinstance(value, int) and value > config.num_server_rounds
    }
    for text in sorted(few | late):
        warn(text)


def warn_of_data(info: DatasetInfo) -> None:
    """Say on standard error how a data set was read where that may surprise, and if it has nothing to learn from."""
    for line in info.remarks:
        warn(line)
    if info.constant:
        warn("the data set is constant: in every channel all pixels of all training images are the same")
