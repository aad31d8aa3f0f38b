"""TensorBoard events in RUN/tensorboard, one step per round, with the config as text. Other files are not copied."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from corolla.experiments.runs import RecordedRun
from corolla.tracking.follow import Follows, settings
from fl_app.files import make_directory
from fl_app.keys import Scalar

DIRECTORY = "tensorboard"


class Store(Follows):
    """Event files."""

    def __init__(self, run: RecordedRun, after: int) -> None:
        make_directory(run.path / DIRECTORY)
        self._writer: Any = EventFileWriter(str(run.path / DIRECTORY))
        start = SessionLog(status=SessionLog.START)
        # hide later rounds that an interrupted run has written
        self._write(Event(step=after + 1, session_log=start))
        table = "\n".join(
            ["| key | value |", "|---|---|", *(f"| {key} | {json.dumps(v)} |" for key, v in settings(run).items())]
        )
        text = TensorProto(dtype="DT_STRING", string_val=[table.encode()], tensor_shape={"dim": [{"size": 1}]})
        self._summary(after, Summary.Value(tag="config", metadata=create_summary_metadata("config", ""), tensor=text))

    def round(self, number: int, values: Mapping[str, float]) -> None:
        """Write a round immediately."""
        self._summary(number, *(Summary.Value(tag=name, simple_value=value) for name, value in values.items()))

    def end(self, summary: Mapping[str, Scalar] | None) -> None:
        """Close the event file."""
        self._writer.close()

    def _summary(self, step: int, *values: Any) -> None:
        self._write(Event(step=step, summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
        self._writer.flush()
