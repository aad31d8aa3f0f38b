"""Command lines and environments of a cluster's processes, as pure functions of the inventory."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy import certificates, connection
from deploy.certificates import CA, KEY_SUFFIX, SERVER, SERVER_KEY
from deploy.detached import cluster_directory
from deploy.inventory import LOCAL, Inventory, SuperLink, SuperNode, is_loopback
from deploy.superlink import address as parsed_address
from fl_app import shell
from fl_app.errors import DeploymentError
from fl_app.privacy.keyring import PEERS
from fl_app.processes import FLOWER, LAUNCH, script
from fl_app.shell import MARK
from fl_app.transport.wire import NODE_NAME, PRIVATE_KEYS

SUPERLINK, TUNNEL, METRICS = "superlink", "tunnel", "metrics"


@dataclass(frozen=True)
class HostPlaces:
    """A cluster's places on one host: its state directory, the directory of Flower's commands, free ports.

    In a script they may be the script's variables (fl_app.shell). own_keys: the directory of the key files, if they are
    not copied.
    """

    directory: str
    scripts: str
    ports: tuple[int | str, ...]
    own_keys: str = ""

    @property
    def keys(self) -> str:
        """The directory of the key files."""
        return self.own_keys or f"{self.directory}/keys"


@dataclass(frozen=True)
class Process:
    """One process to start: its name, command line and added environment.

    health: a URL that answers 200 if the process is well. ca: the CA's certificate for it.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    health: str = ""
    ca: str = ""


def host_port(host: str, port: int) -> str:
    """Join an address and a port; IPv6 addresses get brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_address(link: SuperLink) -> str:
    """Return the address on which the fleet API listens: loopback if that is its address, else all interfaces."""
    if is_loopback(link.fleet_address):
        return "127.0.0.1" if link.fleet_address.lower() == "localhost" else link.fleet_address
    return "::" if ":" in link.fleet_address else "0.0.0.0"


def superlink(inventory: Inventory, place: HostPlaces) -> Process:
    """Return the SuperLink's process.

    The fleet API listens on all interfaces unless its address is loopback. The control API listens on loopback only.
    """
    link = inventory.superlink
    command = [
        link.python,
        "-P",
        "-m",
        "deploy.superlink",
        "--fleet",
        host_port(bind_address(link), link.fleet_port),
        "--",
    ]
    if inventory.secure:
        command += ["--ssl-ca-certfile", f"{place.keys}/{CA}", "--ssl-certfile", f"{place.keys}/{SERVER}"]
        command += ["--ssl-keyfile", f"{place.keys}/{SERVER_KEY}", "--enable-supernode-auth"]
    else:
        command += ["--insecure"]
    command += ["--host", "127.0.0.1", "--port", str(link.control_port)]
    if link.database:
        command += ["--database", link.database]
    ca = f"{place.keys}/{CA}" if inventory.secure else ""
    # only at level info does gRPC log why it refused a connection (plaintext to the TLS port)
    environment = {"GRPC_VERBOSITY": "info"} | dict(link.environment)
    return Process(SUPERLINK, tuple(command), environment, health_url(inventory), ca)


def supernode(inventory: Inventory, node: SuperNode, place: HostPlaces, index: int) -> Process:
    """Return the process of a SuperNode behind its site's gate.

    index: its position among its host's SuperNodes, which decides its ports.
    """
    port = str(place.ports[index])
    private = f"{place.keys}/{node.name}{KEY_SUFFIX}" if inventory.secure else ""
    config = node_config(node.client_id, inventory.num_clients, node.data_path, private)
    command = [node.python, "-P", "-m", "deploy.supernode", "--name", f"{inventory.name}/{node.name}"]
    command += [*(["--site", node.site] if node.site else []), *(["--warm", node.warm] if node.warm else []), "--"]
    if inventory.secure:
        command += ["--root-certificates", f"{place.keys}/{CA}"]
        command += ["--auth-supernode-private-key", f"{place.keys}/{node.name}.key"]
    else:
        command += ["--insecure"]
    command += ["--superlink", host_port(inventory.superlink.fleet_address, inventory.superlink.fleet_port)]
    command += ["--host", "127.0.0.1", "--port", port, "--node-config", config]
    environment = {"OMP_NUM_THREADS": str(node.threads), "MKL_NUM_THREADS": str(node.threads)}
    if node.gpu is not None:
        environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": node.gpu}
    return Process(node.name, tuple(command), environment | dict(node.environment), f"http://127.0.0.1:{port}/health")


def listen_address(text: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT, or of PORT on loopback. Raises UserError."""
    return parsed_address(text if ":" in text else f"127.0.0.1:{text}", "--metrics")


def metrics(inventory: Inventory, place: HostPlaces, listen: str, runs: str) -> Process:
    """Return the process that serves metrics, on the SuperLink's host.

    listen: HOST:PORT. runs: the directory of the run folders.
    """
    link = inventory.superlink
    command = [link.python, "-P", "-m", "deploy.prometheus", "--listen", listen, "--runs", runs]
    command += ["--control", f"127.0.0.1:{link.control_port}"]
    if inventory.secure:
        command += ["--root-certificates", f"{place.keys}/{CA}"]
        command += [word for name in (CA, SERVER) for word in ("--certificate", f"{place.keys}/{name}")]
    if link.database:
        command += ["--database", link.database]
    host, _, port = listen.rpartition(":")
    # one that listens on all addresses answers on loopback
    asked = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    return Process(METRICS, tuple(command), {}, f"http://{asked}:{port}/health")


def node_config(client_id: int, num_clients: int, data_path: str, private_keys: str, name: str = "") -> str:
    """Return --node-config, which the client receives.

    It holds the client's id, the number of clients, the path of its own data, the path of its key for private runs, and the
    site's name.
    """
    texts = {"data-path": data_path, PRIVATE_KEYS: private_keys, NODE_NAME: name}
    given = "".join(f" {key}={_quoted(text)}" for key, text in texts.items() if text)
    return f"partition-id={client_id} num-partitions={num_clients}{given}"


def _quoted(text: str) -> str:
    """Return a text as a TOML string. Quotation marks are escaped by number, because Flower ends the text at any mark."""
    # a shell's variable stays one
    return '"' + re.sub(rf'(?!{MARK})["\\\x00-\x1f\x7f]', lambda found: f"\\u{ord(found[0]):04x}", text) + '"'


def tunnel(inventory: Inventory, ca: str) -> Process:
    """Return the ssh process that forwards a remote SuperLink's control port to this machine's loopback."""
    port = inventory.superlink.control_port
    command = ["ssh", *SSH_OPTIONS, "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15", "-N"]
    command += ["-L", f"127.0.0.1:{port}:127.0.0.1:{port}", "--", inventory.superlink.host]
    return Process(TUNNEL, tuple(command), {}, health_url(inventory), ca)


SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15")


def health_url(inventory: Inventory) -> str:
    """Return the URL of the control API's health check."""
    return f"http{'s' if inventory.secure else ''}://127.0.0.1:{inventory.superlink.control_port}/health"


def num_ports(inventory: Inventory, host: str) -> int:
    """Return the number of free ports for a host: one for each of its SuperNodes."""
    return len([node for node in inventory.supernodes if node.host == host])


# under the home of another host's user
_THERE = ".local/state/corolla/clusters"

# Host by host ---------------------------------------------------------------------------------------------------------


def by_host(inventory: Inventory) -> str:
    """Return shell text: every host's commands, in the order to run them. Commands that stay running end in ` &`."""
    link = inventory.superlink
    blocks = [_host(inventory, link.host, link.python, serves=True)]
    if link.host != LOCAL:
        ca = f"{inventory.keys}/{certificates.CA}" if inventory.secure else ""
        blocks.append(["# here: the SuperLink's control port", f"{shell.line(tunnel(inventory, ca).command)} &"])
    blocks.append(_connection(inventory))
    pythons = {node.host: node.python for node in inventory.supernodes}
    blocks += [_host(inventory, host, python, serves=False) for host, python in pythons.items()]
    blocks.append(_run(inventory))
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _host(inventory: Inventory, host: str, python: str, *, serves: bool) -> list[str]:
    """Return the commands that start a host's SuperLink, or its SuperNodes."""
    place, nodes = _place(inventory, host, python), [node for node in inventory.supernodes if node.host == host]
    if serves:
        processes, keys = [superlink(inventory, place)], [certificates.SERVER, certificates.SERVER_KEY]
    else:
        processes = [supernode(inventory, node, place, k) for k, node in enumerate(nodes)]
        keys = [f"{node.name}.key" for node in nodes]
        private = [PEERS, *(f"{node.name}{KEY_SUFFIX}" for node in nodes)]
        keys += [name for name in private if (Path(inventory.keys) / name).is_file()]
    lines = [f"# {host}: {', '.join(process.name for process in processes)}"]
    if inventory.secure and host != LOCAL:
        there = f"{_THERE}/{inventory.name}/keys"
        files = [f"{inventory.keys}/{name}" for name in (certificates.CA, *keys)]
        lines.append(f"#   before, from here: {shell.line(['ssh', host, f'mkdir -p -m 700 {there}'])}")
        lines.append(f"#   {shell.line(['scp', '-p', *files, f'{host}:{there}/'])}")
    lines.append(shell.line(["mkdir", "-p", "-m", "700", f"{place.directory}/flwr"]))
    path = f"{place.scripts}:{shell.variable('PATH')}"
    around = {"PATH": path, **FLOWER, "FLWR_HOME": f"{place.directory}/flwr"}
    return lines + [f"{shell.line(process.command, around | dict(process.environment))} &" for process in processes]


def _place(inventory: Inventory, host: str, python: str) -> HostPlaces:
    """Return the places on a host, without asking it.

    Ports follow the control port. On this machine the keys stay in their own directory.
    """
    link, count = inventory.superlink, num_ports(inventory, host)
    free = [port for port in range(link.control_port + 1, link.control_port + 2 + count) if port != link.fleet_port]
    here = host == LOCAL
    directory = (
        str(cluster_directory(inventory.name)) if here else f"{shell.variable('HOME')}/{_THERE}/{inventory.name}"
    )
    return HostPlaces(directory, str(Path(python).parent), tuple(free[:count]), inventory.keys if here else "")


def _connection(inventory: Inventory) -> list[str]:
    """Return the commands that add the SuperLink to Flower's config here, and register the nodes' keys with it."""
    name, config = inventory.name, connection.config_path()
    trust = f'root-certificates = "{inventory.keys}/{certificates.CA}"' if inventory.secure else "insecure = true"
    table = f'\\n[superlink.{name}]\\naddress = "127.0.0.1:{inventory.superlink.control_port}"\\n{trust}\\n'
    lines = ["# here, once the SuperLink answers", shell.line(["mkdir", "-p", str(config.parent)])]
    lines.append(f"{shell.line(['printf', '%b', table])} >> {shell.word(str(config))}")
    for node in inventory.supernodes if inventory.secure else ():
        public = f"{inventory.keys}/{node.name}.pub"
        lines.append(shell.line([script("flwr"), "supernode", "register", public, name, "--name", node.name]))
    return lines


def _run(inventory: Inventory) -> list[str]:
    """Return the commands that start a run."""
    lines = ["# here: a run"]
    if inventory.joined:
        lines[0] += (
            f"; clients {', '.join(map(str, inventory.joined))} are started by their sites, after `corolla cluster admit`"
        )
    run = [
        sys.executable,
        "-P",
        "-m",
        "corolla",
        "run",
        "--superlink",
        inventory.name,
        "--clients",
        str(inventory.num_clients),
    ]
    return [*lines, shell.line(run)]


# Slurm ----------------------------------------------------------------------------------------------------------------

_JOB = """#!/bin/bash
#SBATCH --job-name={job}
#SBATCH --ntasks={count}
#SBATCH --cpus-per-task={threads}
{more}#SBATCH --signal=B:TERM@60
#SBATCH --output={job}-%j.log
#
# A SuperLink, {count} SuperNodes, and a run on them: sbatch SCRIPT ARGUMENTS, with the arguments of `corolla run`
#   sbatch SCRIPT my-experiment.toml --set seed=1
#   sbatch SCRIPT --resume runs/NAME          resumes an interrupted run
# Submit it in a directory that all nodes share. Memory, time and partition: options of sbatch, or more #SBATCH lines.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
python={python}
work=$PWD/{job}-$SLURM_JOB_ID
mkdir -m 700 "$work" "$work/flwr"
export python work PATH={scripts}:$PATH {flower} FLWR_HOME="$work/flwr" COROLLA_STATE_HOME="$work/state" {launch}="$work"
address={address}
export address
superlink= nodes= run=
finish() {{
  trap - EXIT TERM INT
  for process in $run $nodes $superlink; do
    kill "$process" 2> /dev/null && wait "$process" || true
  done
  "$python" -P -c {end} "$work"  # and their children
  rm -rf "$work/keys" "$work/flwr"
  exit "$1"
}}
trap 'finish $?' EXIT
trap 'finish 143' TERM INT
{keys}
{superlink} > "$work/superlink.log" 2>&1 &
superlink=$!
until {answers}; do
  kill -0 $superlink || {{ tail -n 30 "$work/superlink.log"; exit 1; }}
  sleep 1
done
printf {connection} > "$FLWR_HOME/config.toml"
{register}
cat > "$work/supernode.sh" << 'END'
port=$("$python" -P -c 'from fl_app.processes import free_ports; print(*free_ports(1))')
case $SLURM_PROCID in
{nodes}
esac
END
srun --ntasks={count} --output="$work/supernode-%t.log" bash "$work/supernode.sh" &
nodes=$!
"$python" -P -m corolla run --superlink {name} --clients {count} "$@" &
run=$!
wait $run
"""
_KEYS = """cat > "$work/lab.yaml" << END
name: {name}
keys: "$work/keys"
tls: true
superlink: {{fleet-address: "$address"}}
hosts: [{{host: local, supernodes: {count}}}]
END
"$python" -P -m corolla cluster keys "$work/lab.yaml\""""
_REGISTER = """for key in "$work"/keys/supernode-*.pub; do
  flwr supernode register "$key" {name} --name "$(basename "$key" .pub)"
done"""


def slurm(inventory: Inventory) -> str:
    """Return a job script that starts SuperLink and SuperNodes on Slurm's nodes, runs, and ends them.

    An inventory with a loopback address becomes a job on one node. With TLS the job makes its own keys, for the address
    of the node that it starts on. Raises UserError for clients that join by themselves.
    """
    if inventory.joined:
        joined = ", ".join(map(str, inventory.joined))
        raise DeploymentError(
            key="hosts", rule=f"clients {joined} are started by their own sites (host: joins), a Slurm job cannot"
        )
    link, count = inventory.superlink, len(inventory.supernodes)
    python = link.python
    alone = is_loopback(link.fleet_address)
    work = shell.variable("work")
    address = link.fleet_address if alone else shell.variable("address")
    moved = dataclasses.replace(inventory, superlink=dataclasses.replace(link, fleet_address=address))
    place = HostPlaces(work, str(Path(python).parent), (shell.variable("port"),))
    process = superlink(moved, place)
    ca = [process.ca] if process.ca else []
    end = "import sys; from fl_app.processes import end_processes, processes_with; "
    end += f"end_processes(processes_with('{LAUNCH}=' + sys.argv[1]))"
    check = "import sys; from deploy.health import answers; sys.exit(not answers(*sys.argv[1:]))"
    trust = 'root-certificates = "%s/keys/ca.crt"' if inventory.secure else "insecure = true"
    table = f'[superlink]\\ndefault = "{inventory.name}"\\n[superlink.{inventory.name}]\\n'
    table += f'address = "127.0.0.1:{link.control_port}"\\n{trust}\\n'
    more = ["#SBATCH --nodes=1"] * alone + ["#SBATCH --gpus-per-task=1"] * any(
        node.gpu for node in inventory.supernodes
    )
    return _JOB.format(
        job=f"corolla-{inventory.name}",
        name=inventory.name,
        count=count,
        more="".join(f"{line}\n" for line in more),
        threads=max(node.threads for node in inventory.supernodes),
        python=shell.word(python),
        scripts=shell.word(place.scripts),
        flower=" ".join(f"{name}={value}" for name, value in FLOWER.items()),
        address=shell.word(address) if alone else "$(hostname -f)",
        keys=_KEYS.format(name=inventory.name, count=count) if inventory.secure else "",
        superlink=shell.line(process.command, process.environment),
        answers=shell.line([python, "-P", "-c", check, process.health, *ca]),
        connection=shell.word(table) + (' "$work"' if inventory.secure else ""),
        register=_REGISTER.format(name=inventory.name) if inventory.secure else "",
        end=shell.word(end),
        launch=LAUNCH,
        nodes="\n".join(_case(moved, node, place, python) for node in inventory.supernodes),
    )


def _case(inventory: Inventory, node: SuperNode, place: HostPlaces, python: str) -> str:
    """Return the shell case of one task, a SuperNode. Slurm decides its GPU."""
    here = dataclasses.replace(node, python=python, gpu=None if node.gpu else node.gpu)
    process = supernode(inventory, here, place, 0)
    return f"{node.client_id}) exec {shell.line(process.command, process.environment)} ;;"
