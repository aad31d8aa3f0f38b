"""A SuperLink's process that starts ServerApps: another one is started when it ends, and none is left at the end."""

from __future__ import annotations

import psutil
import pytest

from tests.e2e.conftest import Cluster, runs, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def starters(cluster: Cluster) -> list[psutil.Process]:
    """The SuperLink's processes that start applications."""
    children = cluster.processes["superlink"].children(recursive=True)
    return [child for child in children if runs(child, "flower-superexec")]


def test_the_process_that_starts_server_apps_is_started_again(cluster: Cluster) -> None:
    cluster.start_superlink()
    (first,) = wait_for(lambda: starters(cluster))
    first.kill()
    (second,) = wait_for(lambda: [one for one in starters(cluster) if one.pid != first.pid])
    cluster.processes["superlink"].terminate()
    cluster.processes["superlink"].wait(60)
    wait_for(lambda: not second.is_running())
