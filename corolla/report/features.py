"""Pictures of a run's final models on their clients' test samples: confusion matrices, and a map of features by t-SNE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas
from numpy.typing import NDArray

from corolla.report import charts
from corolla.report.arrays import ReportedRun
from corolla.report.pictures import Panel
from corolla.report.recorded import class_labels, client_labels
from corolla.report.upload_numbers import maps

if TYPE_CHECKING:
    from corolla.experiments.exported.client_answers import ClientAnswers

# most cells of the clients' confusion matrices, and most samples on the map of features
MOST_CELLS, MOST_SAMPLES = 20_000, 1000
EVERYBODY = "all clients"
CONFUSION = (
    "Test samples by true and predicted class, each client with its own final model. Colour: their share of the true class's "
    "samples. Choose a client below the picture, or highlight it in another one.{left_out}"
)
FEATURES = (
    "{samples} test samples of {clients} clients. Features are the inputs of the classifier of each client's own final model. "
    "Near points have similar features. The axes, and distances between groups, have no meaning. Highlight a client to see its "
    "samples alone."
)


def of_features(run: ReportedRun, clients: Sequence[ClientAnswers]) -> Iterator[Panel]:
    """Yield the confusion matrices of a run's clients, and the map of their features if they have any."""
    number, everybody = run.number.replace(".", "-"), len(clients)
    clients = [client for client in clients if len(client.truth)]
    if not clients:
        return
    names = client_labels(run, [client.client for client in clients])
    classes = class_labels(run, clients[0].classes)
    cells, kept = confusions(names, classes, clients)
    left_out = f" {len(kept)} of the {everybody} clients can be chosen." if len(kept) < everybody else ""
    draw = partial(charts.confusions, cells, classes, [EVERYBODY, *kept])
    yield Panel(f"confusion-{number}", "Confusion matrices", CONFUSION.format(left_out=left_out), draw)
    points = features(names, classes, clients)
    if len(points):
        text = FEATURES.format(samples=f"{len(points):,}", clients=points["client"].nunique())
        yield Panel(f"features-{number}", "Features by t-SNE", text, partial(charts.features, points, classes))


def confusions(
    names: Sequence[str], classes: Sequence[str], clients: Sequence[ClientAnswers]
) -> tuple[charts.Frame, list[str]]:
    """Return the cells of confusion matrices, and the names of the clients that have one, as many as MOST_CELLS allow.

    Cells: whose (a client, or EVERYBODY), class, predicted, samples, and value, their share of the class's samples.
    """
    every = [client.truth * len(classes) + client.predicted for client in clients]
    everybody = np.concatenate(every)
    sizes = [len(np.unique(own)) for own in (everybody, *every)]
    kept = [k for k, used in enumerate(np.cumsum(sizes)[1:]) if used <= MOST_CELLS]
    found = [_cells(EVERYBODY, classes, everybody), *(_cells(names[k], classes, every[k]) for k in kept)]
    return pandas.concat(found, ignore_index=True), [names[k] for k in kept]


def _cells(whose: str, classes: Sequence[str], pairs: NDArray[np.int64]) -> charts.Frame:
    """Return the cells of one confusion matrix. pairs: true class * classes + predicted class, of each sample."""
    cells, samples = np.unique(pairs, return_counts=True)
    truth, predicted = divmod(cells, len(classes))
    value = samples / np.bincount(truth, samples)[truth]
    named = {"class": np.array(classes)[truth], "predicted": np.array(classes)[predicted]}
    return pandas.DataFrame({"whose": whose, **named, "samples": samples, "value": value})


def features(names: Sequence[str], classes: Sequence[str], clients: Sequence[ClientAnswers]) -> charts.Frame:
    """Return points of samples: client, class, predicted, x, y. It is empty without features that `maps` can place.

    A client has at most its share of MOST_SAMPLES, at equal distances. Samples with features that are not finite are left out.
    """
    most, frames, values = max(1, MOST_SAMPLES // len(clients)), [], []
    for name, own in zip(names, clients, strict=True):
        if own.features is None:
            return pandas.DataFrame()
        at = np.flatnonzero(np.isfinite(own.features).all(axis=1))
        at = at[np.linspace(0, len(at) - 1, min(most, len(at))).astype(int)]
        said = {"class": np.array(classes)[own.truth[at]], "predicted": np.array(classes)[own.predicted[at]]}
        frames.append(pandas.DataFrame({"client": name, **said}))
        values.append(own.features[at])
    points = np.concatenate(values)
    places = maps(points)[1] if points.shape[1] > 1 and len(points) > 1 else None
    if places is None:
        return pandas.DataFrame()
    return pandas.concat(frames, ignore_index=True).assign(x=places[:, 0], y=places[:, 1])
