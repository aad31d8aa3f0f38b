"""One request to one host: a function call on this machine, `python -m deploy.node` over ssh elsewhere."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deploy import node
from deploy.commands import SSH_OPTIONS
from deploy.inventory import LOCAL
from deploy.node import REPLY_MARK, Json
from fl_app.errors import DeploymentError, UserError

T = TypeVar("T")
_SECONDS = 120


def ask(host: str, python: str, request: Json) -> Json:
    """Send a request and return the reply. Raises UserError with the host and the fault, there or on the way."""
    if host == LOCAL:
        try:
            return node.handle(request)
        except UserError as error:
            raise DeploymentError(_prefixed(host, str(error))) from None
    # -P: a directory named deploy in the home directory must not shadow this package
    command = ["ssh", *SSH_OPTIONS, "--", host, shlex.join([python, "-P", "-m", "deploy.node"])]
    try:
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=_SECONDS)
    except FileNotFoundError:
        raise DeploymentError(key=host, rule="there is no ssh command on this machine") from None
    except subprocess.TimeoutExpired:
        raise DeploymentError(key=host, rule=f"no reply over ssh within {_SECONDS} s") from None
    # a login shell may print lines before the reply
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(REPLY_MARK):
            reply: Json = json.loads(line.removeprefix(REPLY_MARK))
            if "error" in reply:
                raise DeploymentError(_prefixed(host, reply["error"]))
            return reply
    raise DeploymentError(key=host, rule=_failure(done, python))


def _prefixed(host: str, message: str) -> str:
    return "\n".join(f"{host}: {line}" for line in message.splitlines())


def _failure(done: subprocess.CompletedProcess[str], python: str) -> str:
    """Return the reason why an ssh command returned no reply."""
    output = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
    if done.returncode == 255:
        return f"ssh failed: {output}"
    if done.returncode in (126, 127):
        return f"cannot run {python} there; is `python` right? {output}"
    if "No module named" in output:
        return f"{python} has no Corolla of this version (`make install` there): {output}"
    return f"{python} -m deploy.node ended with code {done.returncode}: {output}"


def each(work: Callable[[str], T], hosts: Iterable[str]) -> dict[str, T]:
    """Run `work` for all hosts at once and return the results. Raises one UserError with every host's problem."""
    results, failures = attempt_each(work, hosts)
    if failures:
        raise DeploymentError("\n".join(str(error) for error in failures.values()))
    return results


def attempt_each(work: Callable[[str], T], hosts: Iterable[str]) -> tuple[dict[str, T], dict[str, UserError]]:
    """Run `work` for all hosts at once. Return results and failures by host."""

    def attempt(host: str) -> tuple[str, T | UserError]:
        try:
            return host, work(host)
        except UserError as error:
            return host, error

    names = list(hosts)
    with ThreadPoolExecutor(max(1, min(16, len(names)))) as pool:
        done = list(pool.map(attempt, names))
    return (
        {host: result for host, result in done if not isinstance(result, UserError)},
        {host: result for host, result in done if isinstance(result, UserError)},
    )
