from __future__ import annotations

from typing import Any

import pytest

from fl_app.transport import wire
from fl_app.transport.wire import WireError
from tests.facts import rejected
from tests.fl_app.test_wire import EXPECTED, reply, upload


@pytest.mark.parametrize("metrics", [{"accuracy-after": "x" * 2**21}, {"x" * 2**21: 1.0}, {"arrays": "x" * 2**21}])
def test_a_text_of_any_length_makes_one_short_line(metrics: dict[str, Any]) -> None:
    with rejected(WireError, "", "has 2097152 characters", "most 1048576 are allowed") as info:
        wire.decode_upload(reply(upload(), **metrics), EXPECTED)
    assert len(str(info.value)) <= 1000 and "\n" not in str(info.value)


def test_a_wire_error_is_one_short_line() -> None:
    assert str(WireError("one\ntwo " + "x" * 5000)) == "one two " + "x" * 492
