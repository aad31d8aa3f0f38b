"""Choice of the processes for a simulation's clients: a pool of workers, or Ray's actors in Flower's simulation."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum

from fl_app.errors import UserError


class Backend(Enum):
    """Processes in which a simulation's clients run."""

    pool = "pool"
    ray = "ray"


def refuse_unable(asked: Backend | None, ray_address: str | None, gpus_per_client: float) -> None:
    """Raise UserError if a pool is asked for work that only Ray can do: sharing GPUs, or using other machines."""
    if asked is Backend.pool and (needs := _need_of_ray(ray_address, gpus_per_client)):
        raise UserError(f"{needs} is for --backend ray, got --backend {asked.value}")


def refuse_beside(option: str, asked: Backend | None) -> None:
    """Raise UserError if a backend is given together with an option that excludes simulations."""
    if asked:
        raise UserError(f"{option} and --backend exclude each other: --backend is for simulations")


def chosen(asked: Backend | None, ray_address: str | None, gpus_per_client: float, devices: Iterable[str]) -> Backend:
    """Return the backend of simulations. devices: values of the runs' key `device`.

    The pool is the default on Linux if no GPU may be used, where it is tested. Ray is the default elsewhere.
    """
    if _need_of_ray(ray_address, gpus_per_client):
        return Backend.ray
    if asked:
        return asked
    return Backend.pool if sys.platform == "linux" and not _may_use_gpu(devices) else Backend.ray


def _need_of_ray(ray_address: str | None, gpus_per_client: float) -> str:
    """Return the option that needs Ray, or ""."""
    return "--ray-address" if ray_address is not None else "--gpus-per-client" if gpus_per_client else ""


def _may_use_gpu(devices: Iterable[str]) -> bool:
    if all(device == "cpu" for device in devices):
        return False
    import torch

    return torch.cuda.is_available()
