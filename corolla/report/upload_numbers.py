"""Numbers of kept uploads (key `keep-uploads`): angles, squared deviations, sensitivities, and maps of local models.

Everything is computed in blocks of columns of the files' maps, so that memory stays bounded for any model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corolla.report.arrays import Floats, ReportedRun
from fl_app.layout import Slot
from fl_app.server import kept_uploads
from fl_app.server.client_files import read_tensors
from fl_app.server.kept_uploads import KeptUploads
from fl_app.server.run_folder import MODELS

# of more clients in a round, this many are measured, at equal distances
MOST_CLIENTS = 200
# float64 values of a block
_BLOCK = 4_000_000
# part of the largest deviation below which a parameter counts as one that does not train
_DEAD = 1e-3


@dataclass(frozen=True)
class Spread:
    """How far a round's uploads lie apart, by parameter tensor; the last entry is the whole model.

    names: of the tensors. angles: mean angle between two clients' updates, in degrees, [tensors + 1], NaN if fewer than
    two clients changed the tensor. deviations: mean squared deviation of a local value from the mean over clients,
    [tensors + 1]. largest: the largest one of the model.
    """

    round: int
    names: list[str]
    angles: Floats
    deviations: Floats
    largest: float


def kept(run: ReportedRun, rounds: Iterable[int]) -> Iterator[KeptUploads]:
    """Yield a run's kept uploads of some rounds, if they can be read. Rounds with one upload have no spread and are left out."""
    for round in rounds:
        found = kept_uploads.read(run.path, round)
        if found is not None and len(found.clients) > 1 and found.params:
            yield found


def chosen(n: int, most: int = MOST_CLIENTS) -> NDArray[np.intp]:
    """Return rows that stand for n rows: all, or `most` of them at equal distances."""
    return np.arange(n) if n <= most else np.linspace(0, n - 1, most).astype(np.intp)


def spread(found: KeptUploads) -> Spread:
    """Return the angles between a round's updates (FedCAC Fig. 1a) and the squared deviations (FedPake Fig. 6)."""
    rows = chosen(len(found.clients))
    n, size = len(rows), max(1, found.params[-1].stop)
    products, squares, largest = [], [], 0.0
    for slot in found.params:
        product, square = np.zeros((n, n)), 0.0
        for at in _blocks(slot, n):
            local = found.W[rows, at].astype(np.float64)
            if found.sent is not None:
                update = local - _sent(found, rows, at)
                product += update @ update.T
            deviation = (local - local.mean(axis=0)) ** 2
            square += float(deviation.sum())
            largest = max(largest, float(deviation.max()))
        products.append(product)
        squares.append(square / n)
    sizes = [slot.size for slot in found.params]
    angles = [mean_angle(product) for product in (*products, np.sum(products, axis=0))]
    deviations = [square / max(1, count) for square, count in zip(squares, sizes, strict=True)]
    return Spread(
        found.round,
        [slot.name for slot in found.params],
        np.array(angles),
        np.array([*deviations, sum(squares) / size]),
        largest,
    )


def mean_angle(products: Floats) -> float:
    """Return the mean angle over pairs of vectors in degrees, given their scalar products [n, n].

    Vectors of length 0 have no angle. NaN if fewer than two are left.
    """
    lengths = np.sqrt(np.diag(products))
    there = lengths > 0
    if there.sum() < 2:
        return math.nan
    unit = products[np.ix_(there, there)] / np.outer(lengths[there], lengths[there])
    pairs = np.triu_indices(len(unit), 1)
    return float(np.degrees(np.arccos(np.clip(unit[pairs], -1, 1))).mean())


def sensitivity(found: KeptUploads, most: int) -> tuple[list[int], Floats] | None:
    """Return client ids and their sensitivities of the classifier's weight, [clients, outputs, inputs] (FedCAC Eq. 5, Fig. 1b).

    A sensitivity is |(w_after - w_before) * w_after|; before is the model that the client was sent. most: number of
    clients, those of the lowest ids. None if no classifier is uploaded, or if the sent models are not known.
    """
    slot = next((s for s in found.params if s.name in found.classifier and len(s.shape) == 2), None)
    if slot is None or found.sent is None:
        return None
    rows = np.argsort(found.clients, kind="stable")[:most]
    at = slice(slot.start, slot.stop)
    after = found.W[rows, at].astype(np.float64)
    scores = np.abs((after - _sent(found, rows, at)) * after)
    return found.clients[rows].tolist(), scores.reshape(len(rows), *slot.shape)


@dataclass(frozen=True)
class LocalValues:
    """A parameter's values on the clients (FedPake Fig. 2).

    name: with its place in the tensor. values: [n]. sent: its value in the model that all clients were sent, and after:
    in the global model made from the uploads; NaN if it is not known.
    """

    name: str
    values: Floats
    sent: float
    after: float


def extreme_values(run: ReportedRun, found: KeptUploads, count: int) -> tuple[list[LocalValues], list[LocalValues]]:
    """Return the parameters with the largest standard deviations over clients, and those with the smallest.

    Deviations below `_DEAD` times the largest are left out: such a parameter does not train. Each list has at most
    `count` parameters.
    """
    deviation = np.empty(found.params[-1].stop, np.float32)
    for slot in found.params:
        for at in _blocks(slot, len(found.clients)):
            deviation[at] = found.W[:, at].astype(np.float64).std(axis=0)
    alive = np.flatnonzero(deviation > _DEAD * deviation.max())
    order = alive[np.argsort(deviation[alive], kind="stable")]
    after = _global_after(run, found)
    one = found.sent is not None and len(found.sent) == 1

    def values(column: int) -> LocalValues:
        slot = next(s for s in found.params if s.start <= column < s.stop)
        index = ", ".join(str(i) for i in np.unravel_index(column - slot.start, slot.shape))
        return LocalValues(
            f"{slot.name}[{index}]",
            found.W[:, column].astype(np.float64),
            float(found.sent[0, column]) if one and found.sent is not None else math.nan,
            math.nan if after is None else float(after[slot.name].reshape(-1)[column - slot.start]),
        )

    few = min(count, -(-len(order) // 2))
    return [values(k) for k in order[::-1][:few].tolist()], [values(k) for k in order[:few].tolist()]


def _global_after(run: ReportedRun, found: KeptUploads) -> dict[str, NDArray[np.float32]] | None:
    """Return the global model made from a round's uploads, by tensor; None if it is not in the run folder.

    It is what all clients are sent in the next round, if that is kept, or the run's final model.
    """
    later = kept_uploads.read(run.path, found.round + 1)
    if later is not None and later.sent is not None and len(later.sent) == 1 and later.params == found.params:
        return {slot.name: later.sent[0, slot.start : slot.stop] for slot in later.params}
    path = run.path / MODELS / "global.safetensors"
    if found.round != max(run.rounds, default=0) or not run.finished or not path.is_file():
        return None
    try:
        tensors = read_tensors(path, [slot.name for slot in found.params])
    except (OSError, ValueError):
        return None
    return tensors if all(tensors[slot.name].size == slot.size for slot in found.params) else None


def relative(files: Sequence[KeptUploads]) -> list[tuple[NDArray[np.int64], Floats]]:
    """Return client ids [n] and coordinates [n, m] of each round's local models, relative to the round's mean.

    The distance of two rows is that of the two models' deviations from their rounds' means, also across rounds. m is
    the number of all rows.
    """
    rows = [chosen(len(found.clients)) for found in files]
    ends = np.cumsum([0, *map(len, rows)])
    products = np.zeros((ends[-1], ends[-1]))
    for slot in files[0].params:
        for at in _blocks(slot, int(ends[-1])):
            local = [found.W[own, at].astype(np.float64) for found, own in zip(files, rows, strict=True)]
            both = np.concatenate([block - block.mean(axis=0) for block in local])
            products += both @ both.T
    values, vectors = np.linalg.eigh(products)
    points = vectors * np.sqrt(np.maximum(values, 0))
    return [
        (found.clients[own], points[start:stop])
        for found, own, start, stop in zip(files, rows, ends[:-1], ends[1:], strict=True)
    ]


def maps(points: Floats) -> tuple[Floats, Floats | None]:
    """Return maps of points [m, k] by principal components and by t-SNE, [m, 2] each.

    Fewer than five points, and equal ones, have no t-SNE. It starts from the principal components; its perplexity is 30,
    or a third of the points if these are fewer.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    principal = PCA(2, svd_solver="full").fit_transform(points)
    if len(points) < 5 or not np.ptp(principal[:, 0]):
        return principal, None
    perplexity = min(30.0, (len(points) - 1) / 3)
    neighbours = TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(points)
    return principal, np.asarray(neighbours, np.float64)


def _sent(found: KeptUploads, rows: NDArray[np.intp], at: slice) -> NDArray[np.float32]:
    """Return columns of the models that these rows' clients were sent: one row if they are the same."""
    assert found.sent is not None
    return found.sent[:, at] if len(found.sent) == 1 else found.sent[rows, at]


def _blocks(slot: Slot, rows: int) -> Iterator[slice]:
    """Yield the columns of a tensor in blocks whose float64 copy stays small."""
    width = max(1, _BLOCK // max(1, rows))
    for start in range(slot.start, slot.stop, width):
        yield slice(start, min(start + width, slot.stop))
