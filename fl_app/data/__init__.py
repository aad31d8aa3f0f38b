"""Data sets, converted once into memory-mapped arrays, and each client's part of them.

`check` prepares everything before a run; `open_client` opens one client's samples in milliseconds. torch, torchvision,
scikit-learn and PIL are imported only while converting.
"""

from fl_app.data.clients import ClientData, check, open_client, partition_remarks, repeated
from fl_app.data.prepared import DatasetInfo, Prepared, data_root
from fl_app.data.sources import prepare, prepare_for

__all__ = [
    "ClientData",
    "DatasetInfo",
    "Prepared",
    "check",
    "data_root",
    "open_client",
    "partition_remarks",
    "prepare",
    "prepare_for",
    "repeated",
]
