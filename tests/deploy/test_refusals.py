from __future__ import annotations

import pytest

from deploy.node import explain_refusals

FAILED = "INFO : Connection attempt failed, retrying in 1.2 seconds\n"
CUT = f"INFO : SuperNode ID: 17\n{FAILED}{FAILED}INFO : Connection successful after 40.21 seconds and 9 tries.\n"


@pytest.mark.parametrize(
    ("log", "meaning"),
    [
        ("Exit Code: 305\n[code: 2004] Failed to activate SuperNode", "its key is not registered"),
        ("[code: 2001] SuperNode authentication is enabled", "without a key"),
        (f"Handshake failed: CERTIFICATE_VERIFY_FAILED: ...\n{FAILED}", "wrong CA"),
        (FAILED, "no answer at the fleet address, plaintext to a TLS port"),
        (f"INFO : SuperNode ID: 17\n{FAILED}", "no answer at the fleet address"),  # a cut that lasts
        (f"{CUT}{FAILED}", "no answer at the fleet address"),  # and another one
        ("INFO : SuperNode terminated gracefully.", "its clock is more than 5 s ahead"),
        ("INFO : SuperNode ID: 17\nINFO : SuperNode terminated gracefully.", "its key was revoked"),
        (f"{FAILED}INFO : SuperNode terminated gracefully.", "no answer"),  # it was told to end
        # a newer Flower's SuperExec goes on for a while
        (f"INFO : SuperNode ID: 17\nINFO : SuperNode terminated gracefully.\n{FAILED}", "its key was revoked"),
        # it was started again
        (
            f"INFO : SuperNode terminated gracefully.\nINFO : Starting Flower SuperNode\n{FAILED}",
            "no answer at the fleet address",
        ),
    ],
)
def test_a_supernodes_refusal(log: str, meaning: str) -> None:
    found = explain_refusals("supernode-12", log)
    assert len(found) == 1 and meaning in found[0]


def test_no_refusal_no_words() -> None:
    assert explain_refusals("supernode-0", f"{FAILED}INFO : SuperNode ID: 17") == []
    # a long log loses its beginning
    assert explain_refusals("supernode-0", CUT) == explain_refusals("supernode-0", CUT.partition("\n")[2]) == []
    assert explain_refusals("tunnel", FAILED) == [] and explain_refusals("superlink", "") == []


def test_a_superlinks_refusals_are_all_named_once() -> None:
    log = "No SuperNode found with the given public key\n" * 3 + "SSL_ERROR_SSL: WRONG_VERSION_NUMBER\n"
    found = explain_refusals("superlink", log)
    assert len(found) == 2 and "not registered" in found[0] and "plaintext" in found[1]
