"""Pictures of models: kept uploads (FedCAC's Fig. 1, FedPake's Fig. 1, 2 and 6), and final models on test samples.

Numbers of uploads (key `keep-uploads`) are computed in blocks of columns of the files' maps, so that memory stays bounded
for any model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas
from numpy.typing import NDArray

from corolla.report import charts
from corolla.report.arrays import Floats, Frame, ReportedRun, averaged, class_counts, class_labels, client_labels
from corolla.report.by_kind import MOST_LINES, layer_lines
from corolla.report.charts import ROUNDS, WIDTH, Axis, Chart, Panel
from corolla.report.groups import Group, as_cells, bins, line, spaced
from fl_app.layout import Slot
from fl_app.server import kept_uploads
from fl_app.server.checkpoint import read_tensors
from fl_app.server.kept_uploads import KeptUploads
from fl_app.server.run_folder import MODELS

if TYPE_CHECKING:
    from corolla.experiments.exported.loading import ClientAnswers

# of more clients in a round, this many are measured, at equal distances
MOST_CLIENTS = 200
# clients in the picture of sensitivities, and parameters of each kind in that of local values
SENSITIVE, PARAMETERS = 12, 3
# rounds and inputs of a classifier that are drawn
MOST_MAPS, MOST_INPUTS = 3, 200
# most cells of the clients' confusion matrices, and most samples on the map of features
MOST_CELLS, MOST_SAMPLES = 20_000, 1000
# name of the entry for all tensors together, and for all clients together
MODEL, EVERYBODY = "whole model", "all clients"
NEIGHBOURS = "t-SNE"
ANGLE, DEVIATION = "mean angle (degrees)", "squared deviation"
# float64 values of a block
_BLOCK = 4_000_000
# part of the largest deviation below which a parameter counts as one that does not train
_DEAD = 1e-3
CONFUSION = (
    "Test samples by true and predicted class, each client with its own final model. Colour: their share of the true class's "
    "samples. Choose a client below the picture, or highlight it in another one.{left_out}"
)
FEATURES = (
    "{samples} test samples of {clients} clients. Features are the inputs of the classifier of each client's own final model. "
    "Near points have similar features. The axes, and distances between groups, have no meaning. Highlight a client to see its "
    "samples alone."
)


# Numbers of uploads ---------------------------------------------------------------------------------------------------


def kept(run: ReportedRun, rounds: Iterable[int]) -> Iterator[KeptUploads]:
    """Yield a run's kept uploads of some rounds, if they can be read. Rounds with one upload have no spread and are left out."""
    for round in rounds:
        found = kept_uploads.read(run.path, round)
        if found is not None and len(found.clients) > 1 and found.params:
            yield found


def spread(found: KeptUploads) -> Frame:
    """Return how far a round's uploads lie apart, by parameter tensor; the last row is the whole model.

    angle: mean angle between two clients' updates, in degrees (FedCAC Fig. 1a); NaN if fewer than two changed the tensor.
    deviation, largest: mean and largest squared deviation of a local value from the mean over clients (FedPake Fig. 6).
    """
    rows = spaced(len(found.clients), MOST_CLIENTS)
    products, sums = [], []
    for slot in found.params:
        product, square, largest = np.zeros((len(rows), len(rows))), 0.0, 0.0
        for at in _blocks(slot, len(rows)):
            local = found.W[rows, at].astype(np.float64)
            if found.sent is not None:
                update = local - _sent(found, rows, at)
                product += update @ update.T
            deviation = (local - local.mean(axis=0)) ** 2
            square, largest = square + float(deviation.sum()), max(largest, float(deviation.max(initial=0)))
        products.append(product)
        sums.append((slot.name, square / len(rows), slot.size, largest))
    table = pandas.DataFrame(sums, columns=["layer", "deviation", "size", "largest"])
    table.loc[len(table)] = [MODEL, table["deviation"].sum(), table["size"].sum(), table["largest"].max()]
    table["deviation"] /= table["size"].clip(1)
    return table.assign(round=found.round, angle=[mean_angle(own) for own in (*products, np.sum(products, axis=0))])


def mean_angle(products: Floats) -> float:
    """Return the mean angle over pairs of vectors in degrees, given their scalar products [n, n].

    Vectors of length 0 have no angle. NaN if fewer than two are left.
    """
    lengths = np.sqrt(np.diag(products))
    there = lengths > 0
    if there.sum() < 2:
        return math.nan
    unit = products[np.ix_(there, there)] / np.outer(lengths[there], lengths[there])
    return float(np.degrees(np.arccos(np.clip(unit[np.triu_indices(len(unit), 1)], -1, 1))).mean())


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


def extreme_values(run: ReportedRun, found: KeptUploads, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the parameters with the largest standard deviations over clients, then those with the smallest (FedPake Fig. 2).

    Each is its name, with its place in the tensor, and its values: `values` on the clients [n], `after` in the global
    model made from the uploads, and `sent` in the model that all clients were sent; NaN if it is not known. Deviations
    below `_DEAD` times the largest are left out: such a parameter does not train. count: most parameters of each kind.
    """
    deviation = np.empty(found.params[-1].stop, np.float32)
    for slot in found.params:
        for at in _blocks(slot, len(found.clients)):
            deviation[at] = found.W[:, at].astype(np.float64).std(axis=0)
    alive = np.flatnonzero(deviation > _DEAD * deviation.max())
    order = alive[np.argsort(deviation[alive], kind="stable")].tolist()
    after, few, chosen = _global_after(run, found), min(count, -(-len(order) // 2)), []
    sent = found.sent[0] if found.sent is not None and len(found.sent) == 1 else None
    for column in [*order[::-1][:few], *order[:few]]:
        slot = next(s for s in found.params if s.start <= column < s.stop)
        index = ", ".join(map(str, np.unravel_index(column - slot.start, slot.shape)))
        values = {
            "values": found.W[:, column].astype(np.float64),
            "after": math.nan if after is None else float(after[slot.name].reshape(-1)[column - slot.start]),
            "sent": math.nan if sent is None else float(sent[column]),
        }
        chosen.append((f"{slot.name}[{index}]", values))
    return chosen


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


def relative(files: Sequence[KeptUploads]) -> tuple[Frame, Floats]:
    """Return rounds' local models, a row each with `round` and `client`, and their coordinates [m, m] about the round's mean.

    The distance of two rows is that of the two models' deviations from their rounds' means, also across rounds. m is
    the number of all rows.
    """
    rows = [spaced(len(found.clients), MOST_CLIENTS) for found in files]
    every = sum(map(len, rows))
    products = np.zeros((every, every))
    for slot in files[0].params:
        for at in _blocks(slot, every):
            local = [found.W[own, at].astype(np.float64) for found, own in zip(files, rows, strict=True)]
            both = np.concatenate([block - block.mean(axis=0) for block in local])
            products += both @ both.T
    values, vectors = np.linalg.eigh(products)
    whose = {
        "round": np.repeat([found.round for found in files], [*map(len, rows)]),
        "client": np.concatenate([found.clients[own] for found, own in zip(files, rows, strict=True)]),
    }
    return pandas.DataFrame(whose), vectors * np.sqrt(np.maximum(values, 0))


def maps(points: NDArray[np.floating[Any]]) -> tuple[Floats, Floats | None]:
    """Return maps of points [m, k] by principal components and by t-SNE, [m, 2] each.

    Fewer than five points, and equal ones, have no t-SNE. It starts from the principal components; its perplexity is 30,
    or a third of the points if these are fewer.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    principal = PCA(2, svd_solver="full").fit_transform(points)
    if len(points) < 5 or not np.ptp(principal[:, 0]):
        return principal, None
    neighbours = TSNE(2, perplexity=min(30.0, (len(points) - 1) / 3), init="pca", random_state=0).fit_transform(points)
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


# Pictures of uploads --------------------------------------------------------------------------------------------------


def of_uploads(run: ReportedRun, spreads: Frame) -> Iterator[Panel]:
    """Yield the pictures of a run's kept uploads. spreads: of its kept rounds (`spreads_of`)."""
    # few files are open at a time: each holds file descriptors
    rounds = spreads["round"].unique()
    found = list(kept(run, rounds[spaced(len(rounds), MOST_MAPS)].tolist()))
    if not found:
        return
    number = run.number.replace(".", "-")
    if spreads["angle"].notna().any():
        yield Panel(
            f"upload-angles-{number}",
            "Angle between clients' updates, by layer",
            "Mean over pairs of clients of the angle between their updates (the upload minus the model that was sent), as in "
            "FedCAC's Fig. 1(a). 90 degrees: the updates have nothing in common; above: they work against each other.",
            lambda: _by_layer(spreads, "angle", ANGLE),
        )
    yield Panel(
        f"upload-deviations-{number}",
        "Squared deviation of local models from their mean, by layer",
        "Squared deviation of a parameter's local values from their mean over clients, as mean over a layer's parameters and the "
        "clients (FedPake's Fig. 6). The scale is logarithmic.",
        lambda: _by_layer(spreads, "deviation", DEVIATION, log=True),
    )
    last = found[-1]
    if scores := sensitivity(last, SENSITIVE):
        drawn, all = len(scores[0]), len(last.clients)
        some = f"The {drawn} clients of lowest ids, of {all} in the round." * (drawn < all)
        yield Panel(
            f"upload-sensitivity-{number}",
            f"Sensitivity of the classifier's weights in round {last.round}",
            "Sensitivity |(w after - w before) w after| of every weight of the last layer, one picture per client, relative to the "
            "client's largest; a row is a class (FedCAC's Fig. 1(b)). The grey column beside it has the class's samples, relative "
            f"to the client's most frequent class. {some}",
            lambda: _sensitivities(run, *scores),
        )
    values = extreme_values(run, last, PARAMETERS)
    if not values:
        return
    yield Panel(
        f"upload-values-{number}",
        f"Local values of single parameters in round {last.round}",
        "Number of clients by their trained value of a parameter (FedPake's Fig. 2). Above: the parameters with the largest "
        "standard deviation over clients. Below: those with the smallest one, at least a thousandth of the largest. The new "
        "global value is known in the last round, and if the next round is kept and has one model for all clients.",
        lambda: _local_values(dict(values)),
    )
    yield _map(run, found, f"upload-map-{number}")


def of_all_uploads(groups: Sequence[Group], spreads: Mapping[str, Frame]) -> Iterator[Panel]:
    """Yield the picture that compares rows of runs. spreads: of the kept rounds, by a run's number (`spreads_of`).

    A row is the mean over its runs that keep any round, over the rounds that all these keep.
    """
    found = []
    for turn, group in enumerate(groups):
        each = [spreads[run.number] for run in group.runs if len(spreads.get(run.number, ()))]
        if each:
            whole = pandas.concat(each)
            rounds = whole[whole["layer"] == MODEL].groupby("round")[["angle", "deviation", "largest"]]
            found.append(line(group, turn, **rounds.mean()[rounds.size() == len(each)].reset_index()))
    if len(found) < 2 or not any(map(len, found)):
        return
    frame = pandas.concat(found, ignore_index=True)
    yield Panel(
        "uploads",
        "Angles and deviations of clients' models",
        "Left: mean angle between two clients' updates, for the whole model (FedCAC's Fig. 1(a)). Middle and right: "
        "squared deviation of a parameter's local values from their mean over clients (FedPake's Fig. 6), the mean over parameters "
        "and clients, and the largest. Seeds are averaged. All use the rounds that the runs keep.",
        partial(_comparison, frame),
    )


def spreads_of(run: ReportedRun) -> Frame:
    """Return the spread of every kept round of a run. Rounds with other tensors than the last one are left out."""
    found = [spread(found) for found in kept(run, kept_uploads.rounds(run.path))]
    same = [own for own in found if own["layer"].tolist() == found[-1]["layer"].tolist()]
    return pandas.concat(same) if same else pandas.DataFrame(columns=["round", "layer", "angle"])


# Over rounds ----------------------------------------------------------------------------------------------------------


def _comparison(frame: Frame) -> Chart:
    each, kinds = [], ["angle", "deviation", "largest"]
    titles = ANGLE, f"mean {DEVIATION}", f"largest {DEVIATION}"
    for kind, title in zip(kinds, titles, strict=True):
        axis, values = _axis(title, frame[kind], kind != "angle")
        own = frame.drop(columns=kinds).assign(mean=values)
        each.append(charts.lines(own, ROUNDS, axis, 260, width=charts.small_width(3)))
    return charts.beside(*each, independent=[])


def _axis(title: str, values: Frame, log: bool) -> tuple[Axis, Frame]:
    """Return an axis with its values, a logarithmic one without those of 0 if `log`, unless no value is above 0."""
    log = log and bool((values > 0).to_numpy().any())
    return Axis(title, log=log), values.where(values > 0) if log else values


def _by_layer(spreads: Frame, kind: str, label: str, log: bool = False) -> Chart:
    """Return values by layer over the kept rounds: a line each, or a row each if there are many."""
    table = spreads.pivot(index="layer", columns="round", values=kind)
    table = table.loc[[MODEL, *spreads["layer"].unique()[:-1]]]
    axis, table = _axis(label, table, log)
    names, rounds = table.index.tolist(), table.columns.tolist()
    if len(names) <= MOST_LINES + 1:
        return layer_lines(names, rounds, table.to_numpy(), axis)
    if log:
        axis, table = Axis(f"{label} (log10)"), np.log10(table)
    texts = list(map(str, rounds))
    x, y = charts.names("x", "at", "round", texts), charts.names("y", "row", "", names)
    frame = as_cells(names, texts, table.to_numpy(), "row", "at")
    return charts.cells(frame, x, y, charts.coloured(axis), axis, WIDTH - 250, 16 * len(names))


# One round ------------------------------------------------------------------------------------------------------------


def _sensitivities(run: ReportedRun, ids: list[int], scores: Floats) -> Chart:
    classes, inputs = scores.shape[1:]
    known, names = class_counts(run), class_labels(run, classes)
    mix = dict(zip(*known, strict=True)) if known and known[1].shape[1] == classes else {}
    found = []
    for i, label, own in zip(ids, client_labels(run, ids), scores, strict=True):
        cells = averaged(own, MOST_INPUTS, axis=1)
        firsts = np.linspace(0, inputs, cells.shape[1] + 1).astype(int)[:-1].tolist()
        values = as_cells(names, firsts, (cells / (cells.max() or 1)).round(4), "class", "input")
        samples = pandas.DataFrame({"class": names, "samples": mix.get(i, np.full(classes, np.nan))})
        samples["samples"] /= max(samples["samples"].max(), 1)
        found.append(pandas.concat([samples.dropna(), values]).assign(part=f"client {label}"))
    return charts.sensitivities(pandas.concat(found, ignore_index=True), names, inputs, inputs / cells.shape[1])


def _local_values(parameters: Mapping[str, Mapping[str, Any]]) -> Chart:
    found = []
    for name, own in parameters.items():
        values = own["values"]
        edges = np.histogram_bin_edges(values, int(np.clip(len(values) / 2, 5, 30)))
        marks = {
            "new global model": own["after"],
            "mean of the uploads": values.mean(),
            "sent to the clients": own["sent"],
        }
        rules = pandas.DataFrame({"kind": marks.keys(), "value": marks.values()}).dropna()
        found.append(pandas.concat([bins(values, edges), rules]).assign(part=name))
    return charts.local_values(pandas.concat(found, ignore_index=True))


# Maps -----------------------------------------------------------------------------------------------------------------


def _map(run: ReportedRun, found: Sequence[KeptUploads], name: str) -> Panel:
    files = [each for each in found if each.params == found[-1].params]
    whose, points = relative(files)
    ids, counts, classes = whose["client"].unique().tolist(), class_counts(run), []
    labels = dict(zip(ids, client_labels(run, ids), strict=True))
    every = pandas.DataFrame({"part": "round " + whose["round"].astype(str), "client": whose["client"].map(labels)})
    coloured = ""
    if counts and set(ids) <= set(counts[0]):
        # each client's class with most samples
        largest = counts[1][np.searchsorted(counts[0], whose["client"])].argmax(axis=1)
        names = class_labels(run, counts[1].shape[1])
        every["class"], classes = np.array(names)[largest], np.array(names)[np.unique(largest)].tolist()
        coloured = "Colour and mark: the class with most of the client's samples. "
    kinds = zip(("principal components", NEIGHBOURS), maps(points), strict=True)
    drawn = [every.assign(kind=kind, x=at[:, 0], y=at[:, 1]) for kind, at in kinds if at is not None]
    text = (
        "Each point is a client's upload, as its deviation from the round's mean (FedPake's Fig. 1). All rounds share one map, so "
        f"points that move together have become alike. {coloured}Principal components keep distances, as far as two axes can; "
        "t-SNE keeps neighbours, and its distances between groups mean nothing."
    )
    return Panel(
        name, "Map of local models", text, lambda: charts.maps(pandas.concat(drawn, ignore_index=True), classes)
    )


# Final models on test samples -----------------------------------------------------------------------------------------


def of_features(run: ReportedRun, clients: Sequence[ClientAnswers]) -> Iterator[Panel]:
    """Yield the confusion matrices of a run's clients, and the map of their features if they have any."""
    number, everybody = run.number.replace(".", "-"), len(clients)
    clients = [client for client in clients if len(client.truth)]
    if not clients:
        return
    names = client_labels(run, [client.client for client in clients])
    classes = class_labels(run, clients[0].classes)
    cells, kept = confusions(names, classes, clients)
    yield Panel(
        f"confusion-{number}",
        "Confusion matrices",
        CONFUSION.format(left_out=f" {len(kept)} of the {everybody} clients can be chosen." * (len(kept) < everybody)),
        partial(charts.confusions, cells, classes, [EVERYBODY, *kept]),
    )
    points = features(names, classes, clients)
    if len(points):
        yield Panel(
            f"features-{number}",
            "Features by t-SNE",
            FEATURES.format(samples=f"{len(points):,}", clients=points["client"].nunique()),
            partial(charts.features, points, classes),
        )


def confusions(
    names: Sequence[str], classes: Sequence[str], clients: Sequence[ClientAnswers]
) -> tuple[Frame, list[str]]:
    """Return the cells of confusion matrices, and the names of the clients that have one, as many as MOST_CELLS allow.

    Cells: whose (a client, or EVERYBODY), class, predicted, samples, and value, their share of the class's samples.
    """
    each = zip(names, clients, strict=True)
    own = pandas.concat(
        pandas.DataFrame({"whose": name, "class": c.truth, "predicted": c.predicted}) for name, c in each
    )
    every = pandas.concat([own.assign(whose=EVERYBODY), own])
    cells = every.groupby(["whose", "class", "predicted"], sort=False).size().reset_index(name="samples")
    cells["value"] = cells["samples"] / cells.groupby(["whose", "class"])["samples"].transform("sum")
    for side in ("class", "predicted"):
        cells[side] = np.array(classes)[cells[side]]
    used = cells.groupby("whose", sort=False).size().cumsum()
    kept = used.index[(used <= MOST_CELLS) & (used.index != EVERYBODY)].tolist()
    return cells[cells["whose"].isin([EVERYBODY, *kept])], kept


def features(names: Sequence[str], classes: Sequence[str], clients: Sequence[ClientAnswers]) -> Frame:
    """Return points of samples: client, class, predicted, x, y. It is empty without features that `maps` can place.

    A client has at most its share of MOST_SAMPLES, at equal distances. Samples with features that are not finite are left out.
    """
    most, found, values = max(1, MOST_SAMPLES // len(clients)), [], []
    for name, own in zip(names, clients, strict=True):
        if own.features is None:
            return pandas.DataFrame()
        at = np.flatnonzero(np.isfinite(own.features).all(axis=1))
        at = at[spaced(len(at), most)]
        said = {"class": np.array(classes)[own.truth[at]], "predicted": np.array(classes)[own.predicted[at]]}
        found.append(pandas.DataFrame({"client": name, **said}))
        values.append(own.features[at])
    points = np.concatenate(values)
    places = maps(points)[1] if points.shape[1] > 1 and len(points) > 1 else None
    if places is None:
        return pandas.DataFrame()
    return pandas.concat(found, ignore_index=True).assign(x=places[:, 0], y=places[:, 1])
