"""The equations of the twelve newest methods, written down a second time, in float64 NumPy and for small sizes.

Nothing here calls Corolla. Where there is a choice, the way is another than the product's: derivatives of hypernetworks and of
Q-networks are central differences, a quadratic program is solved by trying every support, permutations by trying all of
them, principal components come from a singular value decomposition. "Printed" is what the paper has; where the methods'
own pages (docs/methods) deviate from it, the docstring says so.

Notation: d parameters, N clients, C classes, k features, n samples. A network is a chain of Linear layers with tanh between
them, as one vector [d]: of each layer the weight [outputs, inputs], then the bias. sizes: inputs, hidden units, C. z are the
features: what enters the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Network = Mapping[str, Array]


# A network of tanh units, cross-entropy and SGD


def layers(w: Array, sizes: Sequence[int]) -> list[tuple[Array, Array]]:
    """Return a network's layers as views of its vector: weight [outputs, inputs] and bias [outputs]."""
    found, at = [], 0
    for into, out in zip(sizes[:-1], sizes[1:], strict=True):
        weight, bias = w[at : at + into * out].reshape(out, into), w[at + into * out : at + (into + 1) * out]
        found.append((weight, bias))
        at += (into + 1) * out
    return found


def joined(parts: Sequence[tuple[Array, Array]]) -> Array:
    """Return layers as one vector."""
    return np.concatenate([each.ravel() for pair in parts for each in pair])


def head(sizes: Sequence[int]) -> slice:
    """Return where the last layer lies in the vector."""
    total = sum((into + 1) * out for into, out in zip(sizes[:-1], sizes[1:], strict=True))
    return slice(total - (sizes[-2] + 1) * sizes[-1], total)


def outputs(w: Array, sizes: Sequence[int], x: Array, divisor: float = 1) -> list[Array]:
    """Return what enters each layer, and the logits: [n, ...] each. divisor: of what tanh is taken of."""
    found, parts = [x], layers(w, sizes)
    for k, (weight, bias) in enumerate(parts):
        a = found[-1] @ weight.T + bias
        found.append(a if k == len(parts) - 1 else np.tanh(a / divisor))
    return found


def gradient(
    w: Array, sizes: Sequence[int], x: Array, by_logits: Array, by_features: Array | float = 0, divisor: float = 1
) -> Array:
    """Return a loss's gradient [d] by the chain rule, from its gradients by the logits [n, C] and by z [n, k]."""
    found, parts = outputs(w, sizes, x, divisor), layers(w, sizes)
    back, slopes = by_logits, []
    for k in reversed(range(len(parts))):
        slopes.append((back.T @ found[k], back.sum(axis=0)))
        back = back @ parts[k][0]
        if k == len(parts) - 1:
            back = back + by_features
        back = back * (1 - found[k] ** 2) / divisor
    return joined(slopes[::-1])


def softmax(logits: Array) -> Array:
    """Return exp(g_c) / sum_b exp(g_b), [n, C]."""
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def by_logits(logits: Array, y: Indices) -> Array:
    """Return the gradient of the mean cross-entropy by the logits: (softmax(g) - onehot(y)) / n, [n, C]."""
    return (softmax(logits) - np.eye(logits.shape[1])[y]) / len(y)


def plain(w: Array, sizes: Sequence[int], x: Array, y: Indices) -> Array:
    """Return the gradient of the mean cross-entropy, [d]."""
    return gradient(w, sizes, x, by_logits(outputs(w, sizes, x)[-1], y))


def sgd(
    w: Array,
    batches: Sequence[Indices],
    slope: Callable[[Array, Indices], Array],
    *,
    rate: float,
    momentum: float,
    decay: float,
    moving: Array | float = 1,
) -> Array:
    """Return w after SGD: v <- m v + g + decay w, w <- w - rate v. slope(w, batch): g. moving: 0 for fixed elements."""
    speed = np.zeros_like(w)
    for batch in batches:
        speed = momentum * speed + moving * (slope(w, batch) + decay * w)
        w = w - rate * speed
    return w


def differences(value: Callable[[], float], arrays: Sequence[Array], by: float = 1e-6) -> list[Array]:
    """Return the derivatives of a value by all elements of arrays, central differences. The arrays move and come back."""
    found = []
    for array in arrays:
        slope = np.zeros_like(array)
        for at in np.ndindex(array.shape):
            kept = array[at]
            array[at] = kept + by
            above = value()
            array[at] = kept - by
            slope[at] = (above - value()) / (2 * by)
            array[at] = kept
        found.append(slope)
    return found


def average(rows: Array, weights: Sequence[float] | Array) -> Array:
    """Return sum_i n_i w_i / sum_i n_i."""
    total = np.zeros(rows.shape[1:])
    for row, weight in zip(rows, weights, strict=True):
        total += weight * row
    return total / sum(weights)


# AdaBest: Varno et al., ECCV 2022, Algorithm 1


def adabest_bias(h: Array, received: Array, trained: Array, rounds: int, mu: float) -> Array:
    """Return h_i <- h_i / (t - t'_i) + mu (theta_t - theta_i), [d]. rounds: t - t'_i."""
    return h / rounds + mu * (received - trained)


def adabest_model(mean: Array, previous: Array, beta: float) -> Array:
    """Return theta_{t+1} = m_t - h with h = beta (m_{t-1} - m_t), [d]. mean: m_t; previous: m_{t-1}."""
    return mean - beta * (previous - mean)


# APPLE: Luo, Wu, IJCAI 2022, Algorithm 1


def apple_lambda(t: int, rounds: int) -> float:
    """Return lambda(t) = (1 + cos(pi (t - 1) / L)) / 2 up to round L, then 0."""
    return (1 + np.cos(np.pi * (t - 1) / rounds)) / 2 if t <= rounds else 0.0


def apple_mixture(cores: Array, p: Array) -> Array:
    """Return theta = sum_j p_j w_j (Eq. 2), [d]. cores: [N, d]."""
    total = np.zeros(cores.shape[1])
    for j, weight in enumerate(p):
        total += weight * cores[j]
    return total


def apple_train(
    cores: Array,
    p: Array,
    own: int,
    batches: Sequence[Indices],
    slope: Callable[[Array, Indices], Array],
    *,
    prior: Array,
    pull: float,
    relation_rate: float,
    rate: float,
    momentum: float,
    decay: float,
) -> tuple[Array, Array]:
    """Return the client's core model and p after its batches. Both move at once, from the same theta and g:

    w_i <- w_i - eta p_ii g,  p_j <- p_j - eta_p (<g, w_j> + lambda mu (p_j - p0_j)). pull: lambda mu.
    """
    cores, p, speed = cores.copy(), p.copy(), np.zeros(cores.shape[1])
    for batch in batches:
        g = slope(apple_mixture(cores, p), batch)
        by_p = np.array([g @ w for w in cores]) + pull * (p - prior)
        speed = momentum * speed + p[own] * g + decay * cores[own]
        p = p - relation_rate * by_p
        cores[own] = cores[own] - rate * speed
    return cores[own], p


# FedPAC: Xu, Tong, Huang, ICLR 2023


def fedpac_statistics(z: Array, y: Indices, classes: int) -> tuple[Array, float]:
    """Return h_k = p_k mu_k, [C, k], and v = (E ||z||^2 - sum_k ||h_k||^2) / n (Section 4.2)."""
    h = np.zeros((classes, z.shape[1]))
    for c in range(classes):
        if (y == c).any():
            h[c] = (y == c).mean() * z[y == c].mean(axis=0)
    return h, (np.mean([row @ row for row in z]) - sum(row @ row for row in h)) / len(y)


def fedpac_program(h: Array, v: Array, i: int) -> Array:
    """Return Q [N, N] of client i's program: a'Qa = sum_j a_j^2 v_j + ||sum_j a_j (h_i - h_j)||^2 (Eq. 12)."""
    n = len(h)
    return np.array([[((h[i] - h[a]) * (h[i] - h[b])).sum() + v[a] * (a == b) for b in range(n)] for a in range(n)])


def on_simplex(Q: Array) -> Array:
    """Return a >= 0 of sum 1 with the least a'Qa: the best stationary point of all supports, [N]."""
    n, best, least = len(Q), np.zeros(len(Q)), np.inf
    for size in range(1, n + 1):
        for support in combinations(range(n), size):
            # Lagrange: 2 Q a = m 1 and sum a = 1
            system = np.zeros((size + 1, size + 1))
            system[:size, :size], system[size, :size], system[:size, size] = Q[np.ix_(support, support)], 1, 1
            found = np.linalg.lstsq(system, np.eye(size + 1)[size], rcond=None)[0][:size]
            if (found < -1e-12).any() or abs(found.sum() - 1) > 1e-9:
                continue
            a = np.zeros(n)
            a[list(support)] = found
            if a @ Q @ a < least - 1e-15:
                best, least = a, a @ Q @ a
    return best


def pull_by_samples(z: Array, y: Indices, goals: Array, known: NDArray[np.bool_]) -> Array:
    """Return the gradient by z of (1 / (n k)) sum_s ||z_s - c_y||^2 (Eq. 6 over k; FedProto's code), [n, k].

    Samples of a class without a goal count among the n and are not pulled.
    """
    return 2 / z.size * (z - goals[y]) * known[y][:, None]


# FedProto: Tan et al., AAAI 2022


def prototypes_of(z: Array, y: Indices, classes: int) -> tuple[Array, Indices]:
    """Return each class's mean features, [C, k], 0 for a class without samples, and the samples per class, [C]."""
    counts = np.array([(y == c).sum() for c in range(classes)])
    return np.array([z[y == c].mean(axis=0) if counts[c] else np.zeros(z.shape[1]) for c in range(classes)]), counts


def mean_prototypes(P: Array, counts: Indices, before: Array, samples: bool = True) -> Array:
    """Return p_c = sum_i n_ic p_ic / sum_i n_ic (Eq. 6), or over the clients that have the class; else the one before, [C, k].

    As printed, Eq. 6 also divides by N: the page of the method says why not.
    """
    found = before.copy()
    for c in range(len(before)):
        n = counts[:, c] if samples else (counts[:, c] > 0).astype(int)
        if n.sum():
            found[c] = average(P[:, c], n)
    return found


def pull_by_classes(z: Array, y: Indices, goals: Array, known: NDArray[np.bool_]) -> Array:
    """Return the gradient by z of sum_c ||p_c - mean z of the batch's class c|| (Eq. 7 and 8), [n, k]."""
    found = np.zeros_like(z)
    for c in set(y.tolist()):
        apart = z[y == c].mean(axis=0) - goals[c]
        if known[c] and np.linalg.norm(apart):
            found[y == c] = apart / np.linalg.norm(apart) / (y == c).sum()
    return found


def distances(z: Array, goals: Array, allowed: NDArray[np.bool_]) -> Array:
    """Return ||z - p_c||, [n, C], infinite for classes that are not to be predicted (Eq. 4)."""
    apart = np.array([[np.sqrt(((row - goal) ** 2).sum()) for goal in goals] for row in z])
    return np.where(allowed, apart, np.inf)


# FedRoD: Chen, Chao, ICLR 2022


def by_balanced_logits(logits: Array, y: Indices, counts: Indices) -> Array:
    """Return the gradient by g of the mean of -log(n_y exp(g_y) / sum_c n_c exp(g_c)), [n, C] (balanced softmax, Eq. 4)."""
    found = np.zeros_like(logits)
    for s, g in enumerate(logits):
        shares = counts * np.exp(g - g.max())
        found[s] = (shares / shares.sum() - np.eye(len(g))[y[s]]) / len(y)
    return found


def fedrod_train(
    w: Array,
    own: Array,
    sizes: Sequence[int],
    x: Array,
    y: Indices,
    batches: Sequence[Indices],
    *,
    balanced: bool,
    rate: float,
    momentum: float,
    decay: float,
) -> tuple[Array, Array]:
    """Return the model [d] and the personal head [h] after a client's batches.

    The balanced loss of G z moves body and G; the cross-entropy of G z + P z moves P alone, at the same point.
    """
    counts = np.bincount(y, minlength=sizes[-1])
    speed, speed_own = np.zeros_like(w), np.zeros_like(own)
    for at in batches:
        z, g = outputs(w, sizes, x[at])[-2:]
        weight, bias = layers(own, sizes[-2:])[0]
        generic = by_balanced_logits(g, y[at], counts) if balanced else by_logits(g, y[at])
        personal = by_logits(g + z @ weight.T + bias, y[at])
        speed = momentum * speed + gradient(w, sizes, x[at], generic) + decay * w
        speed_own = momentum * speed_own + joined([(personal.T @ z, personal.sum(axis=0))]) + decay * own
        w, own = w - rate * speed, own - rate * speed_own
    return w, own


# HeteroFL: Diao, Ding, Tarokh, ICLR 2021


def narrow_sizes(sizes: Sequence[int], rate: float) -> list[int]:
    """Return the sizes of a network of this rate: ceil(r K) of each hidden layer's K units, all inputs, all classes."""
    return [sizes[0], *(int(np.ceil(rate * K - 1e-9)) for K in sizes[1:-1]), sizes[-1]]


def corner(w: Array, sizes: Sequence[int], narrow: Sequence[int]) -> Array:
    """Return the first units and inputs of each layer, as a narrow network."""
    parts = zip(layers(w, sizes), narrow[:-1], narrow[1:], strict=True)
    return joined([(weight[:out, :into], bias[:out]) for (weight, bias), into, out in parts])


def heterofl_mean(
    before: Array, sizes: Sequence[int], parts: Sequence[tuple[Array, Sequence[int]]], has: NDArray[np.bool_]
) -> Array:
    """Return each element's mean over the clients that hold it; who has none keeps its value (Eq. 4 to 6).

    parts: (narrow network, its sizes) by client. has: [N, C], the classes whose rows of the classifier count.
    """
    total, count = np.zeros_like(before), np.zeros_like(before)
    for (own, narrow), classes in zip(parts, has, strict=True):
        sums, held, theirs = layers(total, sizes), layers(count, sizes), layers(own, narrow)
        for k, (weight, bias) in enumerate(theirs):
            for row in range(len(bias)):
                if k < len(theirs) - 1 or classes[row]:
                    sums[k][0][row, : weight.shape[1]] += weight[row]
                    held[k][0][row, : weight.shape[1]] += 1
                    sums[k][1][row] += bias[row]
                    held[k][1][row] += 1
    return np.where(count > 0, total / np.maximum(count, 1), before)


# Per-FedAvg: Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, Algorithm 1


def perfedavg_slope(
    w: Array, slope: Callable[[Array, Indices], Array], inner: Indices, outer: Indices, alpha: float, delta: float
) -> Array:
    """Return g = grad f(w - alpha grad f(w, D), D'), [d]; with delta > 0 minus alpha H g, H g by the difference of gradients."""
    g = slope(w - alpha * slope(w, inner), outer)
    if not delta:
        return g
    return g - alpha * (slope(w + delta * g, inner) - slope(w - delta * g, inner)) / (2 * delta)


# pFedSim: Tan et al., arXiv:2305.15706


def pfedsim_weights(heads: Array, by_rows: bool) -> Array:
    """Return Phi_ij / sum_j Phi_ij, Phi_ij = -log(1 - s_ij), [N, N].

    s: the cosine of classifiers [N, C, k + 1], at least 0, 0.9999 for j = i and at most. by_rows: the mean of the rows'
    cosines, without the bias.
    """

    def cosine(a: Array, b: Array) -> float:
        length = np.sqrt((a * a).sum()) * np.sqrt((b * b).sum())
        return float((a * b).sum() / length) if length else 0.0

    n = len(heads)
    phi = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            a, b = heads[i], heads[j]
            s = np.mean([cosine(p[:-1], q[:-1]) for p, q in zip(a, b, strict=True)]) if by_rows else cosine(a, b)
            phi[i, j] = -np.log(1 - (0.9999 if i == j else min(max(float(s), 0.0), 0.9999)))
    return phi / phi.sum(axis=1, keepdims=True)


# pFedHN: Shamsian et al., ICML 2021, Algorithm 1


def hypernetwork(network: Network, v: Array, relu_last: bool) -> Array:
    """Return h(v): layers w0, b0, w1, ... with ReLU between them, then w and b. relu_last: a ReLU before these, too."""
    h, count = v, (len(network) - 2) // 2
    for k in range(count):
        h = network[f"w{k}"] @ h + network[f"b{k}"]
        if relu_last or k < count - 1:
            h = np.where(h > 0, h, 0)
    return network["w"] @ h + network["b"]


def pfedhn_slopes(network: dict[str, Array], v: Array, trained: Array) -> dict[str, Array]:
    """Return (d theta / d phi)' delta by layer, and for `v`: the derivatives of <h(v), delta>, delta = theta - trained.

    All together are cut to the length 50, as in the authors' code.
    """
    delta = hypernetwork(network, v, False) - trained
    every = {**network, "v": v}
    found = differences(lambda: float(hypernetwork(network, v, False) @ delta), list(every.values()), 1e-4)
    length = np.sqrt(sum((slope**2).sum() for slope in found))
    return {name: slope * min(1, 50 / max(length, 1e-12)) for name, slope in zip(every, found, strict=True)}


# pFedLA: Ma, Zhang, Guo, Xu, CVPR 2022


def pfedla_weights(units: Array, own: int, keep: int) -> tuple[Array, list[int]]:
    """Return alpha_lj = relu(u_lj) / sum_j relu(u_lj), [L, N], and the layers that are the client's own.

    These are the `keep` ones with the largest alpha_li, and those whose units are all 0.
    """
    positive = np.where(units > 0, units, 0)
    mine = [row for row in range(len(units)) if not positive[row].any()]
    alpha = np.array([row / row.sum() if row.any() else row for row in positive])
    mine += sorted(range(len(units)), key=lambda row: -alpha[row, own])[:keep]
    for row in mine:
        alpha[row] = np.eye(units.shape[1])[own]
    return alpha, sorted(set(mine))


def pfedla_mixture(alpha: Array, models: Array, slots: Sequence[slice]) -> Array:
    """Return thetabar_l = sum_j alpha_lj theta_jl (Eq. 5), [d]. models: [N, d]; slots: where each layer lies."""
    found = np.zeros(models.shape[1])
    for row, slot in zip(alpha, slots, strict=True):
        for weight, model in zip(row, models, strict=True):
            found[slot] += weight * model[slot]
    return found


def pfedla_slopes(
    network: dict[str, Array], models: Array, slots: Sequence[slice], own: int, keep: int, trained: Array
) -> dict[str, Array]:
    """Return the derivatives of ||thetabar - theta_i||^2 / 2 by the hypernetwork and by `v`, theta_i fixed (Eq. 7).

    Layers that are the client's own have none.
    """
    rest = {name: layer for name, layer in network.items() if name != "v"}

    def units() -> Array:
        return hypernetwork(rest, network["v"], True).reshape(len(slots), len(models))

    fixed = pfedla_weights(units(), own, keep)[1]

    def value() -> float:
        alpha = pfedla_weights(units(), own, 0)[0]
        alpha[fixed] = np.eye(len(models))[own]
        return float(((pfedla_mixture(alpha, models, slots) - trained) ** 2).sum()) / 2

    return dict(zip(network, differences(value, list(network.values())), strict=True))


# FedMA: Wang et al., ICLR 2020


def fedma_orders(units: Sequence[Array]) -> list[tuple[int, ...]]:
    """Return a permutation of each client's units that maximises sum_l ||sum_j w_jl||^2, each with the others fixed.

    units: [L, d] by client. First each client's to the sum of those before it, then all in turn until none changes. Of equally
    good permutations it keeps the present one.
    """
    count = len(units[0])

    def best(rest: Array, own: Array, now: tuple[int, ...]) -> tuple[int, ...]:
        def gain(order: tuple[int, ...]) -> float:
            return float(sum(rest[row] @ own[unit] for row, unit in enumerate(order)))

        found = max(permutations(range(count)), key=gain)
        return found if gain(found) > gain(now) + 1e-12 * (1 + abs(gain(now))) else now

    orders = [tuple(range(count)) for _ in units]
    for j in range(1, len(units)):
        orders[j] = best(sum(units[i][list(orders[i])] for i in range(j)), units[j], orders[j])
    changed = len(units) > 1
    while changed:
        changed = False
        for j in range(len(units)):
            rest = sum(units[i][list(orders[i])] for i in range(len(units)) if i != j)
            found = best(rest, units[j], orders[j])
            changed, orders[j] = changed or found != orders[j], found
    return orders


def fedma_class_mean(rows: Array, counts: Indices) -> Array:
    """Return w_c = sum_j n_jc w_jc / sum_j n_jc, the plain mean for a class of nobody, [C, ...]. rows: [N, C, ...]."""
    classes = range(rows.shape[1])
    return np.array([average(rows[:, c], counts[:, c] if counts[:, c].sum() else np.ones(len(rows))) for c in classes])


# FAVOR: Wang et al., INFOCOM 2020


def favor_axes(W: Array, most: int) -> tuple[Array, Array]:
    """Return the mean of models [d] and their principal axes [p, d], p <= most and N; 0 for axes in which models do not differ.

    An axis's largest element is positive.
    """
    mean = W.mean(axis=0)
    _, values, axes = np.linalg.svd(W - mean, full_matrices=False)
    found = np.zeros((min(most, len(W)), W.shape[1]))
    for row in range(len(found)):
        if row < len(values) and values[row] > 1e-5:
            axis = axes[row]
            found[row] = axis * np.sign(axis[np.abs(axis).argmax()])
    return mean, found


def favor_values(network: Network, state: Array, active: NDArray[np.bool_] | None = None) -> Array:
    """Return Q(s, a) of all clients a, [N]: one hidden layer of ReLU units. active: the units above 0, if they are given."""
    h = network["w0"] @ state + network["b0"]
    return network["w1"] @ (h * (h > 0 if active is None else active)) + network["b1"]


def favor_step(
    network: dict[str, Array],
    copy: Network,
    seen: Sequence[tuple[Array, int, float, Array]],
    discount: float,
    rate: float,
) -> dict[str, Array]:
    """Return Q after a gradient step on the mean of (Q(s, a) - goal)^2 / 2, goal = r + gamma Q'(s', argmax_b Q(s', b)).

    seen: transitions (s, a, r, s'). copy: Q'. Goals are fixed (double deep Q-learning, Section IV). A unit at 0 has no slope.
    """
    goals = [r + discount * favor_values(copy, s)[favor_values(network, s).argmax()] for _, _, r, s in seen]
    active = [network["w0"] @ s + network["b0"] > 0 for s, _, _, _ in seen]

    def value() -> float:
        each = zip(seen, active, goals, strict=True)
        return float(np.mean([(favor_values(network, s, on)[a] - goal) ** 2 for (s, a, _, _), on, goal in each])) / 2

    slopes = differences(value, list(network.values()))
    return {name: layer - rate * slope for (name, layer), slope in zip(network.items(), slopes, strict=True)}


def favor_reward(accuracy: float, target: float, base: float) -> float:
    """Return r = Xi^(omega - Omega) - 1 (Eq. 3)."""
    return base ** (accuracy - target) - 1
