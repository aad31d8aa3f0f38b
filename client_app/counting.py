"""A process that counts the training samples of a client in a run: `python -m client_app.counting FILE`.

A site's gate starts it (deploy/sample_counting.py), behind the walls of its applications: some readers of data run code that a
file names, and applications may write some of these files. FILE is the number of an open socket. A JSON
object comes from it, with the arguments of `train_samples`. The answer is a number, or `!` and the text of a UserError.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from fl_app.config import parse
from fl_app.config.rules import complain
from fl_app.data import open_data, trained_on
from fl_app.errors import UserError
from fl_app.files import without_near_names
from fl_app.keys import KeySpec, NoParams, Scalar, specs, table_of
from fl_app.plugins import is_reference
from strategies import METHOD_PARAMS

_PIECE = 1 << 16


@without_near_names()
def train_samples(config: Mapping[str, Scalar], client_id: int, num_clients: int, data_path: str) -> int:
    """Return the number of training samples on which a run's config lets a client train. Raises UserError if unreadable.

    num_clients: of a config that does not say it. data_path: of the SuperNode's own data.
    """
    if is_reference(task := str(config.get("task", ""))):
        raise UserError(f"task {task} runs code of its own")
    # a method's keys only as far as they limit samples: its own code does not run here
    raw = {name: value for name, value in config.items() if "." not in name}
    parsed = parse({**raw, "method": "any"}, {"any": NoParams})
    run = dataclasses.replace(parsed, num_clients=parsed.num_clients or num_clients)
    # a sample is one, however often the user's own partition names it
    return trained_on(run, open_data(run, data_path).client(client_id, once=True), limits_of(config))


def limits_of(config: Mapping[str, Scalar]) -> list[tuple[KeySpec, Scalar]]:
    """Return those keys of a run's method that limit the samples it trains on, with their values. Raises UserError.

    An own method has none: it would be imported, and its name can be that of any module of the site.
    """
    method, problems, found = str(config.get("method", "")), list[UserError](), []
    if is_reference(method):
        return []
    for spec in specs(METHOD_PARAMS.get(method, NoParams), table_of(method)):
        if spec.trains_on is not None:
            found.append((spec, spec.read(config.get(spec.name, spec.default), problems)))
    complain(problems)
    return found


def main() -> None:
    """Answer the request that comes from the socket."""
    channel, request = int(sys.argv[1]), bytearray()
    while piece := os.read(channel, _PIECE):
        request += piece
    given: dict[str, Any] = json.loads(request)
    try:
        answer = str(train_samples(**given))
    except UserError as error:
        answer = f"!{error}"
    rest = answer.encode(errors="replace")
    while rest:
        rest = rest[os.write(channel, rest) :]


if __name__ == "__main__":
    main()
