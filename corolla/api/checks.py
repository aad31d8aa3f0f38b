"""Checks and warnings before a run starts on this machine."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from corolla.api.console import console, warn
from corolla.api.waiting import waiting
from fl_app import extras
from fl_app.config import RunConfig
from fl_app.errors import UserError, listed
from fl_app.files import refuse_unreadable, refuse_unwritable
from fl_app.keys import Scalar, affects
from fl_app.model_names import ModelNames, read_card
from fl_app.server.run_folder import called_in, check_data, check_state, read_about, refuse_fewer_rounds
from fl_app.server.start import own_scaling
from fl_app.sources import NODE, path_in
from fl_app.weight_files import files_of
from strategies import METHODS
from strategies.base import leave_network
from strategies.kernels.averages import RULES, rule_of
from strategies.kernels.robust import ABLE

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from fl_app.data import DatasetInfo


def check_locally(config: RunConfig, *, runs_here: bool = False) -> None:
    """Check everything that can fail on this machine before a simulation starts: data, partition, model, device.

    runs_here: the run's server is this process, and takes the network. Raises UserError.
    """
    from fl_app import data, tasks
    from fl_app.layout import Layout
    from fl_app.server import trackers

    trackers.require(config.resolved)
    if config.dataset == NODE:
        raise UserError(
            key="dataset", rule="node is for deployments, where every SuperNode has its own data-path; got a simulation"
        )
    method = METHODS[config.method]
    method.check(config)
    tasks.require_packages(config)
    if config.dp_epsilon:
        extras.require("opacus", "dp-epsilon")
    with waiting(console) as shown:
        shown.step("checking the data and the model", brief=True)
        # imported here because torch takes seconds
        from client_app.trainer import resolve_device

        resolve_device(config.device)
        if config.state_dir:
            refuse_unwritable("state-dir", Path(config.state_dir))
        info = data.check(config)
        if config.resume:
            check_data(Path(config.resume), data.open_data(config).hashes, config)
        remarks = data.partition_remarks(config, brief=True)
        if config.augment != "none" and (len(info.input_shape) != 3 or info.input_shape[1] != info.input_shape[2]):
            raise UserError(
                key="augment", rule=f"{config.augment} needs square images, a sample has shape {list(info.input_shape)}"
            )
        names = ModelNames.of(info)
        if config.normalizes_by_initial and config.initial_weights:
            refuse_scaling(config, names, data.prepare_for(config).x_train.dtype)
        module = network_of(config, info)
        method.travelling(config, Layout.of(module))
        if config.dp_epsilon:
            from client_app.dp import check_module

            check_module(module, config, info.input_shape)
        elif runs_here:
            leave_network(module)
    if line := data.numbering(config):
        console.print(escape(line), soft_wrap=True)
    warn_of_data(info)
    for line in remarks:
        warn(line)


def network_of(config: RunConfig, info: DatasetInfo) -> nn.Module:
    """Return a run's network with its initial weights. info: of its data. Raises UserError."""
    return METHODS[config.method].network(
        config, **info.model_arguments, initial_weights=config.initial_weights, names=ModelNames.of(info)
    )


def refuse_scaling(config: RunConfig, names: ModelNames, dtype: np.dtype[Any]) -> None:
    """Raise UserError if inputs of a dtype cannot be scaled as the model in `initial-weights` was."""
    from fl_app import tasks

    source = f"initial-weights {config.initial_weights}"
    own_scaling(config, source, read_card(source, Path(config.initial_weights)), names)
    if (how := tasks.normalization(config, dtype)) != "mean-std":
        raise UserError(
            key="normalize-over", rule=f"initial needs inputs scaled by mean and std, and these are scaled by {how}"
        )


def check_files(config: RunConfig) -> None:
    """Raise UserError, naming the key, for a file that a key names and that cannot be opened, apart from the data."""
    if path := path_in("partition", config.partition):
        refuse_unreadable("partition", Path(path))
    if config.initial_weights:
        # an empty folder stands for itself
        for file in files_of(weights := Path(config.initial_weights)) or [weights]:
            refuse_unreadable("initial-weights", file)


def check_resumable(run: Path, config: RunConfig, *, here: bool) -> None:
    """Raise UserError if a run cannot resume from its last checkpoint.

    The run is unfinished, or has more rounds configured. here: its clients run on this machine, so the state that the
    checkpoint names must be here.
    """
    from client_app.stored_state import missing_clients, state_root
    from fl_app.server import checkpoint

    check_state(run)
    saved = checkpoint.load_latest(run).meta
    refuse_fewer_rounds(config, saved["round"], may_be_equal="evaluation" in saved["record"])
    root = state_root(config.state_dir)
    versions = {int(client_id): version for client_id, version in saved["versions"].items()}
    if here and (missing := missing_clients(root, str(read_about(run).get("experiment")), versions)):
        clients = f"client{'s' * (len(missing) > 1)} {listed(list(map(called_in(run), missing)))}"
        raise UserError(
            key="resume",
            rule=f"the state of {clients} after round {saved['round']} is not under {root}: `corolla state "
            "remove` removed it, or state-dir was different; without it the run cannot be continued",
        )


def check_resources(cpus_per_client: float, gpus_per_client: float) -> None:
    """Raise UserError, naming the option, for resources that this machine lacks. Ray would wait for them without end."""
    cores = os.cpu_count() or 1
    # no comparison with NaN holds
    if not cpus_per_client <= cores:
        raise UserError(key="--cpus-per-client", rule=f"this machine has {cores} cores, got {cpus_per_client:g}")
    if gpus_per_client:
        import torch

        if not gpus_per_client <= torch.cuda.device_count():
            raise UserError(
                key="--gpus-per-client",
                rule=f"this machine has {torch.cuda.device_count()} GPUs, got {gpus_per_client:g}",
            )


# A key has an effect with one of these values of another key. No values: with all that do not turn that key off.
_NEEDS: Mapping[str, tuple[str, tuple[Scalar, ...]]] = {
    "server-learning-rate": ("server-optimizer", ()),
    "server-beta1": ("server-optimizer", ()),
    "server-beta2": ("server-optimizer", ("adam", "yogi")),
    "server-tau": ("server-optimizer", ("adagrad", "adam", "yogi")),
    "dp-delta": ("dp-epsilon", ()),
    "dp-clip": ("dp-epsilon", ()),
    "private-range": ("private", ()),
    "private-left-out": ("private", ()),
    "private-sketch": ("private", ()),
    "private-regroup": ("private", ()),
    "staleness-decay": ("staleness", ()),
    "staleness-rule": ("staleness", ()),
    "byzantine-ratio": ("robust", tuple(name for name in sorted(RULES) if rule_of(name).counts_byzantine)),
    "finetune-learning-rate": ("finetune-epochs", ()),
}


def _without_its_switch(config: RunConfig, chosen: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each chosen key that another key makes void, with the reason. A key with its default value is none."""
    keys = {key.name: (key, value) for key, value in config.own_keys()}
    for name, (switch, works) in _NEEDS.items():
        (key, value), (other, is_set) = keys[name], keys[switch]
        # `--scale small` also cuts numbers of rounds that nobody chose
        is_cut = key.counts_rounds and config.scale == "small"
        if name not in chosen or value == key.default or is_cut:
            continue
        if is_set not in works if works else other.is_off(is_set):
            yield name, f"{switch} = {str(is_set).lower()}"


def warn_of_settings(given: Iterable[str], runs: Collection[tuple[RunConfig, Collection[str]]]) -> None:
    """Print warnings on standard error about settings without the expected effect. No setting is refused.

    given: keys of --set; a key in a table of a method that no run uses has no effect. Keys of presets and files may be
    meant for several methods, so they cause no warning. runs: each config with its explicitly chosen keys; defaults
    cause no warning.
    """
    methods = {config.method for config, _ in runs}
    for key in given:
        if not any(affects(key, method) for method in methods):
            owner = key.rpartition(".")[0]
            warn(f"{key} has no effect: it is a key of method {owner}, not of {', '.join(sorted(methods))}")
    few = {
        f"robust = {config.robust} cannot exclude an outlier among {asked} clients a round; it needs {ABLE} or more"
        for config, _ in runs
        if config.robust != "none" and config.num_clients and (asked := config.cohort_size(config.num_training)) < ABLE
    }
    void = [dict(_without_its_switch(config, chosen)) for config, chosen in runs]
    # a sweep may vary the switch
    never = {name: why for own in void for name, why in own.items() if all(name in other for other in void)}
    off = {f"{name} has no effect with {why}" for name, why in never.items()}
    late = {line for config, chosen in runs for line in _never_reached(config, {*chosen} - never.keys())}
    for text in sorted(few | late | off | _without_effect(runs)):
        warn(text)


def _never_reached(config: RunConfig, chosen: Collection[str]) -> Iterator[str]:
    """Yield a warning for each key that names a round the run never reaches.

    chosen: explicitly chosen keys. A chosen method also counts as the choice of its defaults.
    """
    rounds = config.num_server_rounds
    for key, value in config.own_keys():
        if not key.counts_rounds or not isinstance(value, int):
            continue
        by_whom = key.name in chosen or (key.begins_after and "method" in chosen)
        if by_whom and (value > rounds or (key.begins_after and value == rounds)):
            how = "is above" if value > rounds else "is not below"
            yield (
                f"{key.name} = {value} {how} num-server-rounds = {rounds}: the part that begins after round {value} is never "
                "reached"
            )


def _without_effect(runs: Collection[tuple[RunConfig, Collection[str]]]) -> set[str]:
    """Return a warning for each chosen key about the division of data that affects none of the runs."""
    bears: dict[str, bool] = {}
    for config, chosen in runs:
        for key, _ in config.own_keys():
            if key.name in chosen and key.about == "data":
                bears[key.name] = bears.get(key.name, False) or key.divides(config.divisions)
    kinds = {"data of the sites" if config.dataset == NODE else f"partition {config.partition}" for config, _ in runs}
    return {f"{name} has no effect with {listed(sorted(kinds))}" for name, does in bears.items() if not does}


def warn_of_data(info: DatasetInfo) -> None:
    """Print warnings on standard error about a data set's interpretation, and if all its images are constant."""
    for line in info.remarks:
        warn(line)
    if info.constant:
        warn("the data set is constant: in each channel, all pixels of all training images are equal")
