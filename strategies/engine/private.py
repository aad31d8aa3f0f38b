"""Private rounds (docs/privacy.md): what the server asks for is masked, what it takes in are sums over groups of clients.

Every pair of a group's members adds and takes away a mask that belongs to this attempt at this round, so the sum of all members'
uploads is the sum of their models, and nothing less says anything. Who drops out therefore costs the attempt: it is repeated, with
other masks, among those who answered. Uploads of an attempt that does not count are not kept. What the sums of a whole run say
together: strategies/engine/cohorts.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_app import rng
from fl_app.config import RunConfig
from fl_app.errors import UserError
from fl_app.keys import Scalar
from fl_app.layout import Layout, Model
from fl_app.wire import GROUP_MIN, PRIVATE, SUM, Expected, Upload, WireError, state_version
from strategies.base.uploads import Intake, Uploads
from strategies.engine import cohorts
from strategies.engine.attempt import TooFewResults
from strategies.engine.cohorts import Book
from strategies.engine.plain import Messages, require

log = logging.getLogger("corolla")


@dataclass(frozen=True)
class Sums:
    """A private round's result. ids: whose uploads are in it, sorted. groups: who was summed up with whom; means: theirs, weighted.

    mean: over all, weighted. bits: the sketches of masks, uint8 [N, ceil(m/8)] in the order of ids, if the method sends masks;
    sketch_bits: m.
    """

    ids: list[int]
    groups: Mapping[int, list[int]]
    means: Mapping[int, Model]
    mean: Model
    bits: NDArray[np.uint8] | None
    sketch_bits: int


@dataclass(kw_only=True)
class MaskedIntake(Intake):
    """Sums that uploads are added to as they come.

    version: of the client states that the attempt makes. weights: what each upload counts, N in all; totals: uint32 [G, d + b], by
    group.
    """

    version: str

    groups: Mapping[int, list[int]]
    weights: Mapping[int, float]
    totals: NDArray[np.uint32]
    group_of: Mapping[int, int]

    def accept(self, client_id: int, upload: Upload, metrics: Mapping[str, Scalar], nbytes: int | None = None) -> None:
        """Add an upload to its group's sum; it is nowhere kept. Raises WireError if it was made for another attempt."""
        if (made_for := upload.metrics.get(PRIVATE, "")) != self.version:
            raise WireError(
                f"its masks are those of attempt {str(made_for)[:20] or 'none'}, asked for was {self.version}"
            )
        self.totals[self.group_of[client_id]] += upload.extras[SUM]
        rest = Upload(upload.model, upload.mask, num_examples=upload.num_examples)
        super().accept(client_id, rest, metrics, nbytes)

    def sums(self, layout: Layout) -> Sums:
        """Return what the sums stand for. Raises TooFewResults if masks did not cancel: then nobody can tell whose did not."""
        n, means = len(self.ids), {}
        for row, (label, members) in enumerate(self.groups.items()):
            means[label] = self._mean(self.totals[row], sum(self.weights[i] for i in members), layout, members)
        whole = self._mean(np.add.reduce(self.totals, axis=0, dtype=np.uint32), float(n), layout, self.ids)
        return Sums(self.ids, self.groups, means, whole, self.bits, self.expected.num_params)

    def _mean(self, total: NDArray[np.uint32], weight: float, layout: Layout, members: list[int]) -> Model:
        from fl_app.privacy import masking

        try:
            params = masking.decode(total[: layout.d], weight, len(self.ids), masking.PARAMS_RANGE)
            return Model(params, masking.decode(total[layout.d :], weight, len(self.ids), masking.BUFFERS_RANGE))
        except ValueError:
            raise TooFewResults(
                f"the masks of clients {members} do not cancel: one of them has other keys than the others, or sent something else"
            ) from None


def sums_of(intake: Intake | None) -> list[list[int]]:
    """Whose sums the server has of a private attempt, whether it counts or not: of groups of which all have answered."""
    if not isinstance(intake, MaskedIntake):
        return []
    return [own for own in intake.groups.values() if all(i in intake.metrics for i in own)]


class Private(Messages):
    """What a method whose Method says `sums` may change of private rounds, and what becomes of them.

    All of it is only called where the key `private` is set.
    """

    @classmethod
    def counts_alike(cls, params: Any) -> bool:
        """Whether all uploads count the same in means, with these parameters: then no client tells how many samples it has."""
        return False

    def sum_groups(self, ids: list[int]) -> Mapping[int, list[int]]:
        """Who is summed up with whom: disjoint groups of at least three that cover `ids`, by a number."""
        return {0: ids}

    def personalize_sums(self, round: int, sums: Sums) -> None:
        """Likewise `personalize`: by default with the mean as the only upload, which is nobody's."""
        one = Uploads([], sums.mean.params[None], sums.mean.buffers[None], np.ones(1), None, {}, [])
        self.personalize(round, one)

    # An attempt

    @functools.cached_property
    def book(self) -> Book:
        """The companies of a private run, and what its clients count (strategies/engine/cohorts.py)."""
        n, some = self.config.num_clients, self.config.fraction_train < 1
        ids = sorted(set(range(n)) - self.config.unseen)
        # not by the run's seed: runs of the same clients have the same companies
        return Book(
            self.folder.path, cohorts.drawn(ids, n, rng.generator(0, "companies")) if some else cohorts.one(ids, n)
        )

    def keep_together(
        self, ids: NDArray[np.int64], labels: NDArray[np.int64], overlap: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Return whom a new grouping sums up together so that no company splits into parts below three (companies.grouped).

        labels: int64 [N], a group by client id; overlap: float64 [n, n] of the clients `ids`, int64 [n].
        """
        similarity = np.eye(len(labels))
        similarity[np.ix_(ids, ids)] = overlap
        parted, labels = cohorts.grouped(self.book.companies, labels, similarity)
        self.book.part(parted)
        return labels

    def participants(self, connected: list[int], round: int) -> list[int]:
        """Whom an attempt asks: in a private round whole companies, or what is left of them, and nobody who dropped out of it.

        Of a company that an earlier attempt of the round has in a sum it asks the same ones, or nobody. With `private-absent =
        company` companies may split. Raises TooFewResults if nobody is left.
        """
        if not self.config.private:
            return super().participants(connected, round)
        here = set(connected) - self.attempt.without
        if whole := self.config.private_absent == "company":
            self.book.part(cohorts.split(self.book.companies, here))
        all_of = cohorts.members(self.book.companies)
        able = [own for own in all_of if here.issuperset(own)] if whole else cohorts.left(self.book.companies, here)
        known = [own for earlier in self.attempt.earlier for own in sums_of(earlier.intake)]
        able = [own for own in able if not cohorts.unlike(self.book.companies, own, known)]
        if idle := sorted(here.difference(*able) - self.config.unseen):
            log.info("round %d: clients %s are not asked: others of their companies are away", round, idle)
        if self.config.fraction_train < 1:  # in an order that does not depend on who is there
            order = rng.generator(self.config.seed, "sampling", round).permutation(self.config.num_clients)
            able.sort(key=lambda own: int(order[self.book.companies[own[0]]]))
            able = able[: self.config.drawn(len(all_of))]
        if not able:
            why = "of a company that nobody is away from (private-absent)" if whole else "of a company"
            why += ", all of them if they answered before" if known else ""
            raise TooFewResults(
                f"private: a round needs {GROUP_MIN} clients {why}, connected and not failed are {sorted(here)}"
            )
        return sorted(i for own in able for i in own)

    def room_for(self, ids: list[int]) -> Intake:
        """Return room for an attempt's uploads, or for their sums."""
        if not self.config.private:
            return super().room_for(ids)
        alike = self.counts_alike(self.config.params)
        sizes = {i: 1.0 if alike else max(1.0, float(self.attempt.declared[i]["train-samples"])) for i in ids}
        self.book.count(sizes, self.config.max_size_weight)
        whole = sum(self.book.counts[i] for i in ids)
        weights = {i: len(ids) * self.book.counts[i] / whole for i in ids}
        groups = self.sum_groups(ids)
        length = self.layout.d + self.layout.b
        empty = np.empty((len(ids), 0), np.float32)
        expected = Expected(0, 0, self._sketch_bits(), extras={SUM: ("<u4", (length,))})
        bits = np.empty((len(ids), -(-expected.num_params // 8)), np.uint8) if expected.sends_mask else None
        group_of = {i: row for row, own in enumerate(groups.values()) for i in own}
        totals = np.zeros((len(groups), length), np.uint32)
        version = state_version(self.attempt.round, self.attempt.generation)
        return MaskedIntake(
            ids,
            expected,
            empty,
            empty,
            bits,
            {},
            np.zeros(len(ids)),
            version=version,
            groups=groups,
            weights=weights,
            totals=totals,
            group_of=group_of,
        )

    def told(self, client_id: int, task: str) -> dict[str, Scalar]:
        """What a client is told beside its model: in a private round with whom it masks, what it counts, the sketches' key."""
        intake = self.attempt.intake
        if task != "train" or not isinstance(intake, MaskedIntake):
            return super().told(client_id, task)
        members = list(intake.groups.values())[intake.group_of[client_id]]
        said: dict[str, Scalar] = {
            f"{PRIVATE}-members": ",".join(map(str, members)),
            f"{PRIVATE}-weight": intake.weights[client_id],
            f"{PRIVATE}-clients": len(intake.ids),
        }
        if intake.expected.sends_mask:
            sealer = min(self.attempt.declared)
            sealed = str(self.attempt.declared[sealer][f"{PRIVATE}-sealed"]).split(",")[client_id]
            said |= {f"{PRIVATE}-sealer": sealer, f"{PRIVATE}-sealed": sealed}
        return super().told(client_id, task) | said

    def use(self, round: int, intake: Intake) -> None:
        """Personalize with what came in, or with its sums."""
        if not isinstance(intake, MaskedIntake):
            return super().use(round, intake)
        require(intake, self.config.min_results, GROUP_MIN)
        if absent := [i for i in intake.ids if i not in intake.metrics]:
            raise TooFewResults(
                f"clients {absent} dropped out: what the others sent is masked, they are asked again", absent
            )
        sums = intake.sums(self.layout)
        intake.forget_stacks()
        self.round = round
        self.personalize_sums(round, sums)
        return None

    # What is said of it

    def _sketch_bits(self) -> int:
        """Bits of the sketch that stands for a method's mask; 0 if it sends none."""
        from fl_app.privacy import overlaps

        d = self.expected().num_params
        return overlaps.length(d, self.config.private_sketch) if d else 0

    def what_leaks(self) -> list[str]:
        """Return, in words, what the server learns of single clients all the same."""
        config = self.config
        records = [
            f"dp-epsilon: training records are covered within ({config.dp_epsilon:g}, {config.dp_delta:g}) over all rounds; test "
            "records, and how many there are of both, are not (docs/privacy.md)"
        ]
        if not config.private:
            return records if config.dp_epsilon else []
        groups = ["which clients agree on their masks, and how far (overlaps)", "groups"] if self._sketch_bits() else []
        noise = ["sample counts, by the noise that dp-epsilon takes"] if config.dp_epsilon else []
        counts = noise if self.counts_alike(config.params) else ["sample counts"]
        accuracies = ["losses and accuracies (report-accuracy = false: not)"] if config.report_accuracy else []
        alone = config.private_absent == "alone"
        away = ["of who was away for a round roughly its model (private-absent = company: not)"] if alone else []
        always = ["who is away and how long each takes", *away, "hashes of personal models"]
        learns = ["sums over groups of at least three", *groups, *counts, *accuracies, *always]
        lines = [
            f"private: the server learns {', '.join(learns)}; it is trusted to keep to the protocol (docs/privacy.md)"
        ]
        if self.config.max_update_norm:
            lines.append("private: max-update-norm leaves nobody out: there is no single upload to measure")
        return lines + (records if config.dp_epsilon else [])


def check(config: RunConfig, why_not: str) -> None:
    """Raise UserError if a run cannot be private. why_not: what its method has against it, "" if nothing."""
    if why_not:
        raise UserError(f"private: method {config.method} cannot run private: {why_not}")
    if config.robust != "none":
        raise UserError(
            f"private: the server sees no single upload that {config.robust} could choose among; set robust = none"
        )
    if config.collect_personal_models:
        raise UserError("private: collect-personal-models uploads every client's own model; leave it off")
    drawn = config.drawn(config.num_training)
    if config.num_clients and drawn < GROUP_MIN:
        raise UserError(
            f"private: a round needs {GROUP_MIN} clients, it has {drawn} (num-clients, fraction-train): among two, each knows the "
            "other's model"
        )
