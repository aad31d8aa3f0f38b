"""How a site's own table differs from the run's: its signs, names, units and missing columns (`[data]` of site.toml).

```toml
[data]
separator = ";"
decimal = ","
rename = {Druck = "pressure"}       # its column, and the run's name
scale = {pressure = 0.001}          # by the run's names: mbar to bar
fill = {humidity = 40.0}            # where the column, or a value in it, is missing
exclude = ["foreman"]               # additional columns, by the run's names
```

The SuperNode hands the table to its applications in an environment variable, as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from fl_app.errors import MALFORMED, UserError, listed
from fl_app.keys import nearest

VARIABLE = "COROLLA_SITE_COLUMNS"
"""Environment variable of applications, with a site's table `[data]`."""


@dataclass(frozen=True)
class SiteColumns:
    """A site's `[data]`. rename: the run's names by the file's. scale, fill, exclude: by the run's names.

    may_lack: whether a table may lack columns that this names, as new rows lack the target.
    """

    separator: str = ""
    decimal: str = ""
    rename: tuple[tuple[str, str], ...] = ()
    scale: tuple[tuple[str, float], ...] = ()
    fill: tuple[tuple[str, float | str], ...] = ()
    exclude: tuple[str, ...] = ()
    may_lack: bool = False

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """Return the table as site.toml has it."""
        given: dict[str, Any] = {
            n: tuple(value.items()) if isinstance(value, dict) else value if isinstance(value, str) else tuple(value)
            for n, value in table.items()
        }
        return cls(**given)

    @classmethod
    def of_environment(cls) -> Self:
        """Return the table that this process was given; the one without effect if there is none."""
        try:
            return cls.of(json.loads(os.environ.get(VARIABLE) or "{}"))
        except MALFORMED:
            raise UserError(key=VARIABLE, rule="must be a site's table [data] as JSON") from None

    @property
    def given(self) -> dict[str, Any]:
        """The keys that have an effect, as site.toml has them."""
        tables = ("rename", "scale", "fill")
        values = {name: value for name, value in asdict(self).items() if value and name != "may_lack"}
        return {name: dict(value) if name in tables else value for name, value in values.items()}

    @property
    def text(self) -> str:
        """The table as JSON, "" for the one without effect."""
        return json.dumps(self.given) if self.given else ""

    @property
    def recorded(self) -> dict[str, Any]:
        """The table as a model's record of its columns has it: {} for the one without effect."""
        return {"site": json.loads(self.text)} if self.text else {}

    def own_name(self, name: str) -> str:
        """Return the site's own name of a column that the run names."""
        return next((own for own, renamed in self.rename if renamed == name), name)

    def names(self, path: Path, header: list[str]) -> list[str]:
        """Return the run's names of a file's columns. Raises UserError for a column that the file does not have."""
        renamed = dict(self.rename)
        lacking = [name for name in renamed if name not in header]
        if lacking and not self.may_lack:
            raise UserError(
                key="rename",
                rule=f"{path} has no column {lacking[0]!r}; it has {listed(header)}{nearest(lacking[0], header)}",
            )
        return [renamed.get(name, name) for name in header]


AS_THE_RUN = SiteColumns()
"""The table without effect."""
