"""Command lines and environments of a cluster's processes, as pure functions of the inventory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.certificates import CA, SERVER, SERVER_KEY
from deploy.inventory import Inventory, SuperLink, SuperNode, is_loopback
from deploy.peers import KEY_SUFFIX
from deploy.superlink import address as parsed_address
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
