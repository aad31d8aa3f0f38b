"""pFedFDA: the classifier is computed, not trained, from class Gaussians that each client adapts to its own features.

McLaughlin, Su: "Personalized Federated Learning via Feature Distribution Adaptation", NeurIPS 2024 (Algorithm 1).

All clients share a body phi, and class means mu [C, k] and one covariance Sigma [k, k] of its features z. A head is the
Bayes classifier of these Gaussians under the client's class prior pi: LDA(mu, Sigma), see `lda_head`.

Client i receives phi, mu_g and Sigma_g.

1. It trains phi under the frozen head LDA(mu_g, Sigma_g).
2. It takes the features of its training data at the trained body. From them it estimates mu_hat and Sigma_hat
   (`local_gaussian`).
3. It sets mu_i = beta mu_hat + (1 - beta) mu_g, and Sigma_i likewise. Cross-validation finds the beta in [0, 1] that
   classifies best.
4. It uploads phi, mu_i and Sigma_i.

Server: the means of all three, weighted by training samples. The personal model is the given body under
LDA(mu_i, Sigma_i) at that body. Before training it is adapted at the received body, after training at the trained one.
Nothing is kept on a client.

Deviations:

- The features are those of all n training samples in evaluation mode. The code reuses those of all epochs, in training
  mode at a moving body. Algorithm 1 means n.
- rho = 1 is the code's. The text adds "a small epsilon I".
- A class is estimated where it has more than `folds` samples, everywhere. The code's training tests the number of all
  samples.
- If no class has `folds` samples, beta is 0, as in the code. The code's comment asks for local statistics instead.
- The means start from U[0, 1), as in the code. In print they are Gaussian.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_app import rng
from fl_app.server.run_folder import RunFolder
from strategies.base import (
    LINEAR,
    POSITIVE,
    ClientState,
    Expected,
    Layout,
    LocalUpdate,
    Means,
    Method,
    MethodError,
    Model,
    Outliers,
    Overview,
    RoundContext,
    Rule,
    RunConfig,
    Sent,
    State,
    Turn,
    Upload,
    Uploads,
    WireError,
    all_but_classifier,
    check_head_trains,
    key,
    unfit,
)
from strategies.baselines.fedavg import FedAvg
from strategies.kernels import choosing, one_thread

# Largest absolute value in the means and covariances that a client sends.
_LARGEST = 1e9

Matrix = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class PFedFDAParams:
    """Parameters of pFedFDA, table `pfedfda`."""

    betas: Literal["single", "separate", "local"] = key(
        "single",
        "Weight of a client's own statistics: one for all (paper), two for means and covariance (the code's default), "
        "or fixed at 1.",
    )
    folds: int = key(
        2, "Folds of the cross-validation; a class with at most this many samples keeps its global mean.", Rule(low=2)
    )
    eps: float = key(
        1e-4,
        "Least class probability and shrinkage of the covariance (epsilon).",
        Rule(low=0, high=1, low_open=True, high_open=True),
    )
    ridge: float = key(1.0, "Added to the diagonal of a local covariance (rho).", POSITIVE)


class Gaussians(NamedTuple):
    """Class Gaussians of the features: means float64 [C, k], and their common covariance, float64 [k, k]."""

    means: Matrix
    covariance: Matrix


# Kernels --------------------------------------------------------------------------------------------------------------


def class_prior(counts: NDArray[np.int64], *, eps: float) -> Matrix:
    """Return the class probabilities pi_c, proportional to n_c/n + eps, float64 [C].

    counts: int64 [C], not all 0.
    """
    raised = counts / counts.sum() + eps
    prior: Matrix = raised / raised.sum()
    return prior


def shrunk(covariance: Matrix, *, eps: float) -> Matrix:
    """Return (1 - eps) Sigma + eps tr(Sigma)/k I, [k, k]."""
    k = len(covariance)
    out: Matrix = (1 - eps) * covariance
    out[np.diag_indices(k)] += eps * np.trace(covariance) / k
    return out


def lda_head(means: Matrix, covariance: Matrix, prior: Matrix, *, eps: float) -> tuple[Matrix, Matrix]:
    """Return the linear classifier of class Gaussians with one covariance: weight H [C, k], bias c [C], float64.

    H = (S^-1 mu^T)^T by a Cholesky solve, S the shrunk covariance; c = -1/2 diag(mu H^T) + log pi. means: [C, k];
    covariance: [k, k]; prior: [C], positive. Raises ValueError if S is not finite. Raises numpy's LinAlgError, a
    ValueError too, if S is not positive definite.
    """
    from scipy.linalg import cho_factor, cho_solve

    factor = cho_factor(shrunk(covariance, eps=eps).T, overwrite_a=True)  # symmetric: .T saves a copy
    weight: Matrix = cho_solve(factor, np.asarray(means, np.float64).T, check_finite=False).T
    return weight, -0.5 * (means * weight).sum(axis=1) + np.log(prior)


def local_gaussian(z: Matrix, y: Labels, means: Matrix, *, least: int, ridge: float) -> tuple[Matrix, Matrix]:
    """Return class means, float64 [C, k], and the common covariance of features, float64 [k, k].

    z: [n, k]; y: int64 [n]; means: [C, k]. A class with more than `least` samples has their mean, any other class c has
    means[c]. The covariance is sum_j (z_j - mean)(z_j - mean)^T / (n - 1) + ridge I, divided by 1 where n is 1.
    """
    z, own = np.asarray(z, np.float64), np.array(means, np.float64)
    for c in np.flatnonzero(np.bincount(y, minlength=len(own)) > least):
        own[c] = z[y == c].mean(axis=0)
    centred = z - own[y]
    covariance = centred.T @ centred / max(len(z) - 1, 1)
    covariance[np.diag_indices(z.shape[1])] += ridge
    return own, covariance


def interpolate(own: Gaussians, shared: Gaussians, betas: tuple[float, float]) -> Gaussians:
    """Return beta own + (1 - beta) shared. betas: of the means, of the covariance."""
    of_means, of_covariance = betas
    means, covariance = of_means * own.means, of_covariance * own.covariance
    means += (1 - of_means) * shared.means
    covariance += (1 - of_covariance) * shared.covariance
    return Gaussians(means, covariance)


def cross_entropy(z: Matrix, y: Labels, head: tuple[Matrix, Matrix]) -> float:
    """Return the sum over samples of a linear classifier's cross-entropy. z: [n, k]; y: int64 [n]."""
    logits = z @ head[0].T + head[1]
    top = logits.max(axis=1, keepdims=True)
    normalizers = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    return float((normalizers - logits[np.arange(len(y)), y]).sum())


def stratified_folds(y: Labels, folds: int, generator: np.random.Generator) -> Labels:
    """Return the samples' fold numbers, int64 [n]: each class dealt evenly, shuffled.

    This is scikit-learn's StratifiedKFold.
    """
    classes, ordered = int(y.max(initial=0)) + 1, np.sort(y)
    shares = np.array([np.bincount(ordered[f::folds], minlength=classes) for f in range(folds)])  # [folds, C]
    out = np.empty(len(y), np.int64)
    for c in range(classes):
        out[y == c] = generator.permutation(np.repeat(np.arange(folds), shares[:, c]))
    return out


class Validation:
    """The cross-entropy on each fold under the Gaussians of the other folds, interpolated with the shared ones.

    z: [n, k]; y, fold: int64 [n]; prior: [C].
    """

    def __init__(
        self,
        z: Matrix,
        y: Labels,
        fold: Labels,
        shared: Gaussians,
        prior: Matrix,
        *,
        least: int,
        ridge: float,
        eps: float,
    ) -> None:
        self.z, self.y, self.fold, self.shared, self.prior, self.eps = z, y, fold, shared, prior, eps
        self._others = {
            int(f): Gaussians(*local_gaussian(z[fold != f], y[fold != f], shared.means, least=least, ridge=ridge))
            for f in np.unique(fold)
        }

    def loss(self, betas: tuple[float, float]) -> float:
        """Return the mean over all samples. betas: of the means, of the covariance."""
        total = 0.0
        for f, others in self._others.items():
            mixed = interpolate(others, self.shared, betas)
            head = lda_head(mixed.means, mixed.covariance, self.prior, eps=self.eps)
            total += cross_entropy(self.z[self.fold == f], self.y[self.fold == f], head)
        return total / len(self.y)


def best_single(loss: Callable[[float], float]) -> float:
    """Return the minimiser on [0, 1]: bounded Brent (xatol 1e-3) and both ends; the smallest in a tie."""
    from scipy.optimize import minimize_scalar

    inner = minimize_scalar(loss, bounds=(0, 1), method="bounded", options={"xatol": 1e-3})
    found = {0.0: loss(0.0), float(inner.x): float(inner.fun), 1.0: loss(1.0)}
    return min(found, key=lambda beta: found[beta])


def best_pair(loss: Callable[[tuple[float, float]], float]) -> tuple[float, float]:
    """Return the minimiser on [0, 1]^2: L-BFGS-B from (0.5, 0.5)."""
    from scipy.optimize import minimize

    found = minimize(lambda x: loss((float(x[0]), float(x[1]))), (0.5, 0.5), method="L-BFGS-B", bounds=[(0, 1)] * 2).x
    return float(found[0]), float(found[1])


def triangle(matrix: NDArray[Any]) -> NDArray[np.float32]:
    """Return the upper triangle of a symmetric matrix [k, k], row by row, float32 [k(k+1)/2]."""
    return matrix[np.triu_indices(len(matrix))].astype(np.float32)


def symmetric(upper: NDArray[Any]) -> Matrix:
    """Return the symmetric matrix of an upper triangle, float64 [k, k]; the inverse of `triangle`."""
    k = (int(np.sqrt(8 * len(upper) + 1)) - 1) // 2
    out = np.empty((k, k))
    rows, columns = np.triu_indices(k)
    out[rows, columns] = out[columns, rows] = upper
    return out


# Halves ---------------------------------------------------------------------------------------------------------------


def head_shape(layout: Layout) -> tuple[int, int]:
    """Return the number of classes C and of features k of the model's classifier."""
    (shape,) = (slot.shape for slot in layout.params if slot.name in layout.classifier and len(slot.shape) == 2)
    return shape[0], shape[1]


def body(layout: Layout, params: object) -> frozenset[str]:
    """Return the names of all tensors but the classifier's. Raises UserError for a classifier without a bias."""
    below = all_but_classifier(layout)
    check_head_trains(layout, "weight", "bias")
    if not any(len(slot.shape) == 1 for slot in layout.params if slot.name in layout.classifier):
        raise unfit("the classifier's weight and bias", "it has no bias")
    return below


def check_size(extras: Mapping[str, NDArray[Any]]) -> None:
    """Raise WireError for Gaussians too far from 0 for a classifier."""
    if not all(np.abs(array).max(initial=0) <= _LARGEST for array in extras.values()):
        raise WireError(f"its means and covariance must lie within {_LARGEST:g} of 0")


class PFedFDA(FedAvg[PFedFDAParams]):
    """Server half. Memory: `means` float32 [C, k], `covariance` float32 [k(k+1)/2]."""

    # an entry-wise median of covariances need not be a covariance
    means = Means(choosing())
    # most clients keep the Gaussians, and one that adapts them moves far: 35 times the usual distance was seen
    outliers = Outliers(tolerance=16.0, extras={"class means": "means", "covariances": "covariance"})

    def __init__(
        self,
        config: RunConfig,
        params: PFedFDAParams,
        layout: Layout,
        initial: Model,
        shared: frozenset[str],
        folder: RunFolder,
    ) -> None:
        super().__init__(config, params, layout, initial, shared, folder)
        classes, k = head_shape(layout)
        self.state.memory["means"] = rng.generator(config.seed, "pfedfda-means").random((classes, k)).astype(np.float32)
        self.state.memory["covariance"] = triangle(np.eye(k))

    def download(self, state: State, client_id: int, turn: Turn) -> Sent:
        """Return the global model and the shared Gaussians."""
        return Sent(state.model, {name: state.memory[name] for name in ("means", "covariance")})

    def form(self, state: State, turn: Turn) -> Expected:
        """Return the form of an upload: the body and adapted Gaussians."""
        extras = {name: ("<f4", self.state.memory[name].shape) for name in ("means", "covariance")}
        return replace(super().form(state, turn), extras=extras)

    def check(self, upload: Upload) -> None:
        """Raise WireError for Gaussians that give no classifier, as they would spoil the shared ones."""
        check_size(upload.extras)
        try:
            np.linalg.cholesky(shrunk(symmetric(upload.extras["covariance"]), eps=self.params.eps))
        except np.linalg.LinAlgError:
            raise WireError("its covariance is not positive definite") from None

    def update(self, state: State, uploads: Uploads, turn: Turn) -> State:
        """Average bodies, means and covariances."""
        mean, weights = turn.average.mean, self.weights(uploads)
        means = {
            name: mean(stack.reshape(len(stack), -1), weights).reshape(stack.shape[1:])
            for name, stack in uploads.extras.items()
        }
        return super().update(state, uploads, turn).next(memory=means)


class PFedFDAUpdate(LocalUpdate[PFedFDAParams]):
    """Client half. An instance serves one message, and keeps its last adaptation."""

    _last: tuple[Model, Gaussians, tuple[float, float]] | None = None

    def merge(self, received: Model, state: ClientState, ctx: RoundContext[PFedFDAParams]) -> Model:
        """Return the received body under the head of the received Gaussians."""
        return self.under(self.shared(ctx), ctx.layout.put(ctx.initial(), received, ctx.shared), ctx)

    def train(self, start: Model, state: ClientState, ctx: RoundContext[PFedFDAParams]) -> Model:
        """Train the body under the frozen head."""
        return ctx.trainer.train(start, frozen=ctx.local)

    def keep_local(self, after: Model, state: ClientState, ctx: RoundContext[PFedFDAParams]) -> None:
        """Keep nothing: a head follows from the Gaussians."""

    def personal(self, model: Model, state: ClientState, ctx: RoundContext[PFedFDAParams]) -> Model:
        """Return a body under the head of the Gaussians adapted at it."""
        return self.under(self.adapted(model, ctx)[0], model, ctx)

    def finetune(self, start: Model, state: ClientState, ctx: RoundContext[PFedFDAParams], epochs: int) -> Model:
        """Tune all tensors, starting from the shared head."""
        return super().finetune(self.under(self.shared(ctx), start, ctx), state, ctx, epochs)

    def upload(self, before: Model, after: Model, state: ClientState, ctx: RoundContext[PFedFDAParams]) -> Upload:
        """Send the body and the Gaussians adapted at it; report beta."""
        plain = super().upload(before, after, state, ctx)
        adapted, (of_means, of_covariance) = self.adapted(after, ctx)
        extras = {"means": adapted.means.astype(np.float32), "covariance": triangle(adapted.covariance)}
        check_size(extras)
        metrics = {**plain.metrics, "beta-means": of_means, "beta-covariance": of_covariance}
        return replace(plain, extras=extras, metrics=metrics)

    def shared(self, ctx: RoundContext[PFedFDAParams]) -> Gaussians:
        """Return the received Gaussians."""
        return Gaussians(ctx.extras["means"].astype(np.float64), symmetric(ctx.extras["covariance"]))

    def under(self, gaussians: Gaussians, model: Model, ctx: RoundContext[PFedFDAParams]) -> Model:
        """Return a model with LDA(mu, Sigma), under the client's prior, as its classifier."""
        prior = class_prior(ctx.trainer.class_counts, eps=ctx.params.eps)
        with one_thread("scipy.linalg"):
            weight, bias = lda_head(gaussians.means, gaussians.covariance, prior, eps=ctx.params.eps)
        head = np.concatenate([weight.reshape(-1), bias]).astype(np.float32)
        return ctx.layout.put(model, Model(head, np.zeros(0, np.float32)), ctx.local)

    def adapted(self, model: Model, ctx: RoundContext[PFedFDAParams]) -> tuple[Gaussians, tuple[float, float]]:
        """Return the adapted Gaussians at a body, and the betas of means and covariance.

        Raises UserError for features that are not finite or do not fit the classifier.
        """
        if self._last is None or self._last[0] is not model:
            z, y = ctx.trainer.features(model)
            classes, k = head_shape(ctx.layout)
            if z.shape[1] != k or not np.isfinite(z).all():
                what = (
                    "not finite: training diverged"
                    if z.shape[1] == k
                    else f"{z.shape[1]} numbers, its last layer takes {k}"
                )
                raise MethodError(key="pfedfda", rule=f"the model's features are {what}")
            with one_thread("scipy.linalg"):
                self._last = model, *adapt(z.astype(np.float64), y, self.shared(ctx), ctx.params, ctx.rng("folds"))
        return self._last[1], self._last[2]


def adapt(
    z: Matrix, y: Labels, shared: Gaussians, p: PFedFDAParams, generator: np.random.Generator
) -> tuple[Gaussians, tuple[float, float]]:
    """Return a client's own Gaussians interpolated with the shared ones, and the betas (Algorithm 1).

    z: [n, k]; y: [n]. The two betas, of the means and of the covariance, are 0 for one sample. Otherwise they are 1
    with `betas = local`, or come from cross-validation, which gives 0 if no class has `folds` samples.
    """
    if len(z) < 2:
        return shared, (0.0, 0.0)
    own = Gaussians(*local_gaussian(z, y, shared.means, least=p.folds, ridge=p.ridge))
    betas = (1.0, 1.0) if p.betas == "local" else cross_validated(z, y, shared, p, generator)
    return interpolate(own, shared, betas), betas


def cross_validated(
    z: Matrix, y: Labels, shared: Gaussians, p: PFedFDAParams, generator: np.random.Generator
) -> tuple[float, float]:
    """Return the betas of least validation loss on the samples of classes with at least `folds`; (0, 0) without any."""
    counts = np.bincount(y, minlength=len(shared.means))
    used = counts[y] >= p.folds
    if not used.any():
        return 0.0, 0.0
    fold, prior = stratified_folds(y[used], p.folds, generator), class_prior(counts, eps=p.eps)
    validation = Validation(z[used], y[used], fold, shared, prior, least=p.folds, ridge=p.ridge, eps=p.eps)
    if p.betas == "separate":
        return best_pair(validation.loss)
    beta = best_single(lambda beta: validation.loss((beta, beta)))
    return beta, beta


def tested(params: PFedFDAParams) -> str:
    """Return the note that both bodies are tested under computed classifiers."""
    return (
        "before training, the received body is tested; after training, the body that the client trained; both under a "
        "classifier computed from its own features there"
    )


METHOD = Method(
    "pfedfda",
    PFedFDAParams,
    PFedFDA,
    PFedFDAUpdate,
    body,
    needs_classes=True,
    needs_whole=True,
    not_private="it sends the mean and covariance of each client's features",
    needs=LINEAR,
    tested=tested,
    local_from_file=False,
    reports=("beta-means", "beta-covariance"),
    overview=Overview(
        group="A part of the model",
        travels="body and Gaussians",
        stays="class prior",
        epochs="E, + 2 forward",
        unseen="global part; its head from Gaussians adapted to its data",
        use="little data, shifted inputs",
    ),
)
