"""Chromium, headless and without a network."""

from __future__ import annotations

import shutil

import pytest

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--window-size=1280,1000",
    "--virtual-time-budget=20000",
]
DARK = "--blink-settings=preferredColorScheme=0"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str:
    """Return the path of a browser; skip the test without one."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip(f"NO BROWSER: none of {', '.join(_NAMES)} is installed, so no page was opened in one")
