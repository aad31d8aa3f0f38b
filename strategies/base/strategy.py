"""The base class of a method's server half: its hooks, and the methods that Flower requires of a Strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Generic, TypeVar

from fl_app.transport.exchange import Exchange, Reply
from fl_app.transport.flower import ArrayRecord, ConfigRecord, Grid, Message, MetricRecord, Result, Strategy
from strategies.base.server_half import ServerHalf
from strategies.engine.attempt import TooFewResults
from strategies.engine.plain import PlainRounds
from strategies.engine.private import PrivateRounds
from strategies.engine.rounds import Rounds

P = TypeVar("P")


class PersonalizedStrategy(ServerHalf[P], Strategy, Generic[P]):
    """The server half of a method as a Flower Strategy: `start` runs the rounds, whose steps are in strategies/engine/rounds.py.

    The hooks are methods of `ServerHalf` (strategies/base/server_half.py).
    """

    _rounds: Rounds | None = None

    @cached_property
    def protocol(self) -> PlainRounds:
        """The protocol of the run's rounds: it exchanges models, or masked sums (key `private`)."""
        return PrivateRounds(self) if self.config.private else PlainRounds(self)

    def rounds(self, exchange: Exchange) -> Rounds:
        """Return the object that runs the rounds over an exchange. The same exchange gets the same object."""
        if self._rounds is None or self._rounds.exchange is not exchange:
            self._rounds = Rounds(self, exchange, self.folder, self.protocol)
        return self._rounds

    def start(  # type: ignore[override]
        self,
        grid: Exchange,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds, then evaluate all clients. Every round is recorded when it ends.

        A round with fewer usable uploads than `min-results` is repeated, up to `round-retries` times, from the same models.
        The run ends after the current round if the user asks it to stop. The run config gives the model, the number of
        rounds and the timeouts. Flower's other arguments are ignored. Raises RoundFailed after the last attempt at a round.
        """
        rounds, arrays, config = self.rounds(grid), initial_arrays or ArrayRecord(), train_config or ConfigRecord()
        for number in rounds.numbers():
            for _ in rounds.attempts(number):
                try:
                    messages = self.configure_train(number, arrays, config, grid)  # type: ignore[arg-type]
                    self.aggregate_train(number, rounds.replies(messages))
                    break
                except TooFewResults as error:
                    rounds.spoil(error)
            if rounds.close_round():
                messages = self.configure_evaluate(number, arrays, config, grid)  # type: ignore[arg-type]
                self.aggregate_evaluate(number, rounds.replies(messages))
                rounds.close_evaluation()
            rounds.write_round()
        return Result()

    # Flower's hooks, the steps of the loop. `grid` is an Exchange, and replies are its replies.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the round's clients by id. Return an iterator that builds their messages one at a time, as they are sent.

        Raises TooFewResults if too few clients are there, UserError if a disk has no room for the round.
        """
        rounds = self._over(grid)
        return rounds.messages(rounds.sample(server_round), "train")

    def aggregate_train(  # type: ignore[override]
        self, server_round: int, replies: Iterator[Reply]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and take in replies as they arrive, drop bad ones by name, then update the state.

        Raises TooFewResults if fewer uploads than `min-results` are usable. Nothing has changed then.
        """
        rounds = self._over()
        rounds.take_in(replies)
        rounds.update(rounds.screen())
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return an iterator over the evaluation messages to all connected clients."""
        rounds = self._over(grid)
        return rounds.messages(rounds.begin_evaluation(server_round), "evaluate")

    def aggregate_evaluate(self, server_round: int, replies: Iterator[Reply]) -> MetricRecord | None:  # type: ignore[override]
        """Collect each client's metrics and the hashes of its model."""
        rounds = self._over()
        for reply in replies:
            rounds.receive_evaluation(reply)
        return None

    def _over(self, grid: Any = None) -> Rounds:
        if grid is not None:
            return self.rounds(grid)
        assert self._rounds is not None, "Flower's configure hook comes first"
        return self._rounds
