"""What the exchange of messages asks of a method's server half, which strategies/base/strategy.py answers as FedAvg would."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from fl_app.layout import Layout, Model
from fl_app.wire import Expected, Upload
from strategies.aggregate import Stack
from strategies.base.uploads import Intake, Uploads


class Said(ABC):
    """The questions; PersonalizedStrategy says what each means."""

    @abstractmethod
    def personalize(self, round: int, uploads: Uploads) -> None:
        """See PersonalizedStrategy."""

    @abstractmethod
    def model_for(self, client_id: int) -> Model:
        """See PersonalizedStrategy."""

    @abstractmethod
    def download_extras(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """See PersonalizedStrategy."""

    @abstractmethod
    def expected(self) -> Expected:
        """See PersonalizedStrategy."""

    @abstractmethod
    def expected_from(self, client_id: int) -> Expected:
        """See PersonalizedStrategy."""

    @abstractmethod
    def complete(self, client_id: int, upload: Upload) -> Upload:
        """See PersonalizedStrategy."""

    @abstractmethod
    def check(self, upload: Upload) -> None:
        """See PersonalizedStrategy."""

    @abstractmethod
    def compared(self, intake: Intake) -> Mapping[str, Stack]:
        """See PersonalizedStrategy."""

    @abstractmethod
    def compared_with(self, client_id: int) -> Mapping[str, NDArray[Any]]:
        """See PersonalizedStrategy."""

    @abstractmethod
    def exported_layout(self, layout: Layout) -> Layout:
        """See PersonalizedStrategy."""

    @abstractmethod
    def sample(self, client_ids: list[int], round: int) -> list[int]:
        """See PersonalizedStrategy."""
