"""An expired certificate is named by `corolla run` too, where Flower speaks of the network."""

from __future__ import annotations

import dataclasses
import datetime
import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from corolla.api import one_run
from deploy import certificates, inventory
from deploy.connection import address_of, bad_certificate
from deploy.prometheus import Exporter, Watched
from fl_app.errors import DeploymentError, UserError
from fl_app.processes import free_ports
from tests.facts import mentions, rejected


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[inventory.Inventory]:
    """Yield a cluster whose control port is served, with an expired certificate, and is in Flower's config as `lab`."""
    raw = {"hosts": [{"host": "local"}], "tls": True, "keys": str(tmp_path / "keys")}
    lab = inventory.parse(raw, "lab", tmp_path)
    with monkeypatch.context() as patch, rejected(DeploymentError, "keys", "server.crt expired on"):
        patch.setattr(certificates, "_SERVER_DAYS", 0)
        certificates.make(lab)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "keys" / "server.crt", tmp_path / "keys" / "server.key")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    text = (
        f'[superlink.lab]\naddress = "127.0.0.1:{server.server_port}"\nroot-certificates = "{tmp_path}/keys/ca.crt"\n'
    )
    (tmp_path / "config.toml").write_text(text)
    yield lab
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_expired_certificate_is_told_from_a_network_that_does_not_work(
    shown: inventory.Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bad_certificate("lab") == "certificate has expired"
    assert bad_certificate("none") == ""

    def refused(*arguments: object) -> None:
        raise UserError("Flower did not accept the run:\nConnection to the SuperLink is unavailable.")

    monkeypatch.setattr(one_run, "run_one", refused)
    with rejected(UserError, "", "superlink lab", "certificate has expired", "`corolla cluster keys"):
        one_run.run_deployed({}, "lab", False)


def test_nobody_shows_no_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text(f'[superlink.lab]\naddress = "127.0.0.1:{free_ports(1)[0]}"\n')
    assert bad_certificate("lab") == ""


def lasting(directory: Path, seconds: float, patch: pytest.MonkeyPatch) -> inventory.Inventory:
    """Return a cluster whose server certificate ends in so many seconds."""
    lab = inventory.parse(
        {"hosts": [{"host": "local"}], "tls": True, "keys": str(directory / "keys")}, "lab", directory
    )
    with patch.context() as days:
        days.setattr(certificates, "_SERVER_DAYS", seconds / 86400)
        certificates.make(lab)
    return lab


@pytest.mark.parametrize(
    "days, stage, words",
    [
        (15, 0, "in 15 days"),
        (13.5, 1, "in 13 days"),
        (1.9, 2, "in 45 hours"),
        (0.03, 3, "in 43 minutes"),
        (-1, 4, "expired on"),
    ],
)
def test_a_certificates_end_is_near_in_steps(
    days: float, stage: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(tmp_path, 20 * 86400, monkeypatch)
    certificate = certificates.read_certificate(tmp_path / "keys" / "server.crt")
    then = certificate.not_valid_after_utc - datetime.timedelta(days=days)
    monkeypatch.setattr(certificates, "now", lambda: then)
    assert certificates.stage(certificate) == stage and words in certificates.expiry_warning(certificate)
    path = tmp_path / "keys" / "server.crt"
    exporter = Exporter(Watched(tmp_path, {"address": "127.0.0.1:1", "insecure": True}, certificates=[path]))
    assert exporter.samples()["certificate_stage"] == {("server.crt",): stage}


def test_all_certificates_of_a_file_are_watched_also_those_of_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lasting(tmp_path, 20 * 86400, monkeypatch)
    both, short = tmp_path / "both.crt", tmp_path / "keys" / "server.crt"
    both.write_bytes((tmp_path / "keys" / "ca.crt").read_bytes() + short.read_bytes())
    end = certificates.read_certificate(short).not_valid_after_utc
    monkeypatch.setattr(certificates, "now", lambda: end + datetime.timedelta(days=1))
    done = threading.Event()

    def once(seconds: float) -> None:
        done.set()
        threading.Event().wait()

    certificates.watch([both], once)
    assert done.wait(30) and f"{both}, number 2 expired on" in caplog.text
    begin = certificates.read_certificate(short).not_valid_before_utc
    monkeypatch.setattr(certificates, "now", lambda: begin - datetime.timedelta(days=1))
    assert mentions(certificates.expiry_warning(certificates.read_certificate(short)), "not valid before")
    caplog.clear()
    certificates.watch([short], once)
    assert mentions(caplog.text, f"{short} is not valid", "before")


def test_each_step_has_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lasting(tmp_path, 20 * 86400, monkeypatch)
    path = tmp_path / "keys" / "server.crt"
    end = certificates.read_certificate(path).not_valid_after_utc
    left = iter([480.0, 336, 335, 47, 46, 0.9, 0.5, -1])
    clock = [next(left)]
    monkeypatch.setattr(certificates, "now", lambda: end - datetime.timedelta(hours=clock[0]))
    done = threading.Event()

    def sleep(seconds: float) -> None:
        clock[0] = next(left, -1.0)
        if clock[0] < 0:
            done.set()

    options = ["--ssl-certfile", str(path), "--ssl-ca-certfile", str(tmp_path / "none"), "--insecure"]
    others = set(threading.enumerate())  # those of other tests never end
    certificates.watch(certificates.named_by(options), sleep)
    assert done.wait(30)
    for thread in set(threading.enumerate()) - others:
        thread.join(30)
    told = [record.getMessage() for record in caplog.records if "server.crt" in record.getMessage()]
    assert len(told) == 4
    for text, words in zip(told, ("in 14 days", "in 47 hours", "in 54 minutes", "expired on"), strict=True):
        assert words in text


def test_a_renewed_certificate_does_not_hide_the_one_that_is_shown(
    shown: inventory.Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = address_of("lab")[1]  # type: ignore[index]
    running = dataclasses.replace(shown, superlink=dataclasses.replace(shown.superlink, control_port=port))
    assert certificates.shown_warnings(running) == []
    certificates.renew(running)
    assert certificates.expiry_warnings(running) == []
    (warning,) = certificates.shown_warnings(running)
    assert mentions(warning, "SuperLink shows a certificate", "expired")
