"""`corolla cluster`: real deployments from one inventory file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from fl_app import exit_codes, log_format
from fl_app.errors import DeploymentError, counted, plain_lines
from fl_app.files import no_such

if TYPE_CHECKING:
    from deploy.backup import KeptPath
    from deploy.cluster import Cluster

app = typer.Typer(no_args_is_help=True, help="SuperLink and SuperNodes on real machines, from one inventory.")

InventoryFile = Annotated[Path, typer.Argument(metavar="CLUSTER.yaml", help="The inventory.")]
Running = Annotated[
    str, typer.Argument(metavar="CLUSTER.yaml", help="The inventory of a running cluster, or its name.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Nothing on standard output; errors on standard error.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS, no authentication: for a trusted network only.")]


@app.command(epilog="Example: corolla cluster up lab.yaml")
def up(
    inventory: InventoryFile,
    insecure: Insecure = False,
    timeout: Annotated[float, typer.Option(help="Seconds the SuperLink, then the SuperNodes, may take.", min=1)] = 90,
    metrics: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve metrics for Prometheus on the SuperLink's host; without HOST on loopback.",
        ),
    ] = "",
    runs: Annotated[str, typer.Option(metavar="DIR", help="The directory of the run folders, for --metrics.")] = "runs",
    log_lines: Annotated[
        str, typer.Option("--log-format", metavar="text|json", help="The log lines of all processes.")
    ] = "",
    quiet: Quiet = False,
) -> None:
    """Start the SuperLink and all SuperNodes, and return when they are connected."""
    from deploy import inventory as inventories
    from deploy import lifecycle
    from deploy.commands import listen_address

    log_format.choose(log_lines)
    found = inventories.read_inventory(inventory, insecure)
    if not found.secure and not inventories.is_loopback(found.superlink.fleet_address):
        _say("note: insecure: anyone on the network can read the models and join as a SuperNode")
    if metrics and not inventories.is_loopback(listen_address(metrics)[0]):
        _say(f"note: --metrics {metrics}: whoever reaches it reads run names, client numbers and scores")
    running = lifecycle.up(found, _say, timeout, metrics, runs)
    nodes, clients = len(running.inventory.supernodes), running.inventory.num_clients
    if joined := running.inventory.joined:
        _say(
            f"clients {', '.join(map(str, joined))} join by themselves: corolla cluster admit {inventory} CLIENT FILE.pub"
        )
    if running.metrics:
        _say(f"metrics of the runs in {running.runs}: http://{running.metrics}/metrics")
    run = f"corolla run --superlink {found.name} --clients {clients} --set method=fedcac"
    _say(f"{counted(nodes, 'SuperNode')} connected. Now: {run}")


@app.command("commands", epilog="Example: corolla cluster commands lab.yaml --slurm")
def print_commands(
    inventory: InventoryFile,
    insecure: Insecure = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="As a job script for sbatch: SuperLink, SuperNodes and a run.")
    ] = False,
) -> None:
    """Print the commands that `up` would start, host by host, for systemd, Ansible or a person. Start nothing."""
    from deploy import commands
    from deploy import inventory as inventories

    found = inventories.read_inventory(inventory, insecure)
    typer.echo(commands.slurm(found) if slurm else commands.by_host(found), nl=False)


@app.command(epilog="Example: corolla cluster status lab.yaml")
def status(
    inventory: Running,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, and nothing else.")] = False,
    allow_offline: Annotated[
        int, typer.Option(metavar="N", help="SuperNodes that may be away without an error.", min=0)
    ] = 0,
) -> None:
    """Show every process and key. Exit with code 1 if one is not running and connected, or if a key is nobody's."""
    from rich.console import Console
    from rich.table import Table

    from deploy import certificates, cluster, joining, superlink_nodes

    running = _running(inventory)
    found, failures = running.status()
    status_by_id = superlink_nodes.status_by_node_id(running)
    nodes = {node.name: node for node in running.inventory.supernodes}
    header = ("node", "client", "name", "host", "GPU", "pid", "state", "health", "SuperLink says", "key")
    rows: list[tuple[str, ...]] = []
    good, away = not failures, 0
    for host, names in running.placement.items():
        for name in names:
            state, node = found[name], nodes.get(name)
            client, gpu = (str(node.client_id), _gpu(node.gpu)) if node else ("", "")
            if not state:
                rows.append((name, client, "", host, gpu, "", "unknown", "", "", _key(running, name)))
                continue
            connected = status_by_id.get(state["node-id"], "unknown") if node else ""
            ready = cluster.is_ready(name, state) and (not node or connected == "online")
            good, away = good and (ready or node is not None), away + (node is not None and not ready)
            lives = "alive" if state["alive"] else "ended"
            healthy = "serving" if state["healthy"] else "no answer"
            pid = str(state["pid"] or "")
            shown = healthy if state["alive"] else ""
            rows.append((name, client, "", host, gpu, pid, lives, shown, connected, _key(running, name)))
    for client_id, connected in superlink_nodes.status_of_joined(running).items():
        lost = joining.was_revoked(running.inventory, client_id)
        admitted = "admitted" if connected else "revoked" if lost else "not admitted yet"
        name = f"supernode-{client_id}"
        called = joining.name_of(running.inventory, client_id)
        rows.append((name, str(client_id), called, "joins", "", "", admitted, "", connected, _key(running, name)))
        away += connected not in ("", "online")
    strangers = superlink_nodes.strangers(running)
    for key in strangers:
        rows.append((key.name, "", "", "", "", "", "no entry has this key", "", key.status, key.fingerprint))
    if as_json:
        keys = [name.lower().replace(" ", "-") for name in header]
        typer.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2, ensure_ascii=False))
    else:
        table = Table(*header)
        for row in rows:
            # enough to tell keys apart; --json has the whole
            table.add_row(*row[:-1], row[-1].removeprefix("SHA256:")[:8])
        Console(width=None if Console().is_terminal else 140).print(table)
    problems = [str(error) for error in failures.values()]
    if running.inventory.secure:
        problems += certificates.expiry_warnings(running.inventory)
        problems += certificates.shown_warnings(running.inventory)
    problems += [
        f"key {key.fingerprint}, registered as {key.name or 'nobody'}, is accepted and no entry has it: "
        f"flwr supernode unregister {key.node_id} {running.inventory.name}"
        for key in strangers
    ]
    if away > allow_offline:
        # nothing allows that a process of the cluster has ended
        allows = f"; --allow-offline {away} allows it" if good and not strangers else ""
        problems.append(f"{counted(away, 'SuperNode')} not connected{allows}")
    for problem in problems:
        typer.echo(problem, err=True)
    if not good or strangers or away > allow_offline:
        raise typer.Exit(exit_codes.FAILED)


@app.command(epilog="Example: corolla cluster logs lab.yaml supernode-2")
def logs(
    inventory: Running,
    node: Annotated[str | None, typer.Argument(help="superlink, supernode-K, tunnel; without it all.")] = None,
    lines: Annotated[int, typer.Option(help="Lines of each log.", min=1)] = 20,
) -> None:
    """Show the end of the logs, also for a cluster with processes that ended."""
    running = _running(inventory)
    for name in [node] if node else running.names:
        # applications without walls, and remote parties, wrote some of it
        text = plain_lines(running.log_end(name, lines))
        typer.echo(text if node else f"--- {name}\n{text}")


@app.command(epilog="Example: corolla cluster restart lab.yaml supernode-2")
def restart(
    inventory: Running,
    node: Annotated[str, typer.Argument(help="supernode-K")],
    timeout: Annotated[float, typer.Option(help="Seconds it may take.", min=1)] = 90,
    quiet: Quiet = False,
) -> None:
    """Start one SuperNode again after its machine came back. A waiting run continues with it."""
    from deploy import lifecycle

    lifecycle.restart(_running(inventory), node, _say, timeout)
    _say(f"{node} is connected")


@app.command(epilog="Example: corolla cluster revoke lab.yaml 2")
def revoke(
    inventory: Running,
    client: Annotated[int, typer.Argument(metavar="CLIENT", help="Client id: the K of supernode-K.")],
    quiet: Quiet = False,
) -> None:
    """Revoke every key that a SuperNode ever had. It is locked out at once and permanently; the others continue."""
    from deploy import joining, superlink_nodes

    running = _running(inventory)
    who = joining.called(running.inventory, client)
    problems = superlink_nodes.revoke(running, client)
    back = "`corolla cluster keys` makes a new one"
    if client in running.inventory.joined:
        back = "the site comes back with another: `corolla node rotate` there, then `corolla cluster admit`"
    _say(f"client {who}: the SuperLink rejects its key; {back}")
    if problems:
        typer.echo("\n".join(problems), err=True)
        raise typer.Exit(exit_codes.FAILED)


@app.command(epilog="Example: corolla cluster down lab.yaml")
def down(
    inventory: Running,
    forget: Annotated[bool, typer.Option("--forget", help="Treat hosts that cannot be reached as ended.")] = False,
    quiet: Quiet = False,
) -> None:
    """End exactly the processes that `up` started, on all hosts, with all children."""
    from deploy import lifecycle

    running = _running(inventory)
    problems = lifecycle.down(running, forget=forget)
    if problems:
        typer.echo("\n".join(problems), err=True)
        typer.echo(
            "not everything could be ended; the cluster stays recorded: try again, or give up hosts with --forget",
            err=True,
        )
        raise typer.Exit(exit_codes.FAILED)
    _say(f"cluster {running.inventory.name} is down")


@app.command(epilog="Example: corolla cluster keys lab.yaml")
def keys(
    inventory: InventoryFile,
    force: Annotated[
        bool, typer.Option("--force", help="Make everything anew; nodes with old keys are locked out.")
    ] = False,
    renew: Annotated[
        bool, typer.Option("--renew", help="Make another server certificate; the nodes' keys stay.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Make the CA, the server certificate and a key pair for every SuperNode. Existing files are kept."""
    from deploy import certificates
    from deploy import inventory as inventories

    found = inventories.read_inventory(inventory)
    if force and renew:
        raise DeploymentError(
            "--force and --renew exclude each other: --force makes everything anew, --renew the certificates"
        )
    written = certificates.renew(found) if renew else certificates.make(found, force)
    _say(
        f"{found.keys}: {counted(len(written), 'file')} written"
        + (": " + ", ".join(p.name for p in written) if written else "")
    )
    _say(f"the server certificate is for {', '.join(certificates.server_names(found))}")
    if renew:
        also = " (the CA's certificate is new, too: a node that has its own copy of ca.crt needs it)"
        renewed_ca = any(path.name == certificates.CA for path in written)
        _say(f"a running cluster uses them after its next `down` and `up`{also if renewed_ca else ''}")
    if not found.secure:
        _say("note: this cluster is on loopback or insecure, and uses them only with `tls: true`")


@app.command(epilog="Example: corolla cluster admit lab.yaml 2 bern.pub")
def admit(
    inventory: InventoryFile,
    client: Annotated[int, typer.Argument(metavar="CLIENT", help="The site's client id, from an entry {host: joins}.")],
    public: Annotated[
        Path, typer.Argument(metavar="FILE.pub", help="The site's public key, from `corolla node join`.")
    ],
    name: Annotated[str, typer.Option(help="The client's name in runs. Without it the name of FILE.pub.")] = "",
    quiet: Quiet = False,
) -> None:
    """Register the public key of a site that joins by itself, and write the invitation to send back."""
    from deploy import cluster, joining, superlink_nodes
    from deploy import inventory as inventories
    from deploy.certificates import hash_of_list as fingerprint
    from fl_app.privacy.keyring import PEERS

    found = inventories.read_inventory(inventory)
    invitation = joining.admit(found, client, public, name=name)
    if name := joining.name_of(found, client):
        _say(f"client {client} has the name {name}")
    cluster.note_joined(found.name, found.joined)
    if running := cluster.find(found.name):
        superlink_nodes.register_key(running, f"supernode-{client}")
        _say(f"client {joining.called(found, client)} is registered with the running cluster {found.name}")
    _say(f"send {invitation} to the site: corolla node start NAME --invitation {invitation.name}")
    if (listed := Path(found.keys) / PEERS).is_file():
        _say(
            f"for private runs send {listed} to all sites: corolla node start NAME --peers {PEERS} (sha256 {fingerprint(listed)})"
        )


@app.command(epilog="Example: corolla cluster rotate lab.yaml 2 bern.pub")
def rotate(
    inventory: InventoryFile,
    client: Annotated[int, typer.Argument(metavar="CLIENT", help="The client id of a site that joined.")],
    public: Annotated[
        Path, typer.Argument(metavar="FILE.pub", help="The site's new public key, from `corolla node rotate`.")
    ],
    quiet: Quiet = False,
) -> None:
    """Replace a joined site's key: the new one is registered, then the old one is revoked."""
    from deploy import cluster, joining, superlink_nodes
    from deploy import inventory as inventories
    from fl_app.privacy.keyring import PEERS

    found = inventories.read_inventory(inventory)
    joining.admit(found, client, public, replace=True)
    who = joining.called(found, client)
    if running := cluster.find(found.name):
        superlink_nodes.register_key(running, f"supernode-{client}")
        _say(f"client {who}: the running cluster {found.name} accepts the new key, and the old one no longer")
    else:
        _say(f"client {who}: its old key ends when the cluster is up; the next `up` registers the new one")
    if (listed := Path(found.keys) / PEERS).is_file():
        _say(f"for private runs send {listed} to all sites again")


@app.command(epilog="Example: corolla cluster backup lab.yaml lab-monday.tar --runs runs")
def backup(
    inventory: InventoryFile,
    archive: Annotated[
        Path, typer.Argument(metavar="FILE.tar", help="The archive to write; only its owner can read it.")
    ],
    runs: Annotated[
        list[Path] | None, typer.Option("--runs", help="Directory of run folders (default: runs). Repeatable.")
    ] = None,
    state_dir: Annotated[
        list[Path] | None, typer.Option("--state-dir", help="Another directory of client state. Repeatable.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Keep what a lost server needs: inventory, keys, database, run folders, and what sites on this machine keep."""
    from deploy import backup as backups
    from deploy import inventory as inventories

    found = inventories.read_inventory(inventory)
    for option, given in (("--runs", runs), ("--state-dir", state_dir)):
        if missing := [path for path in given or [] if not path.is_dir()]:
            raise DeploymentError(key=option, rule=no_such(missing[0]))
    parts = backups.of_server(found, inventory, runs or [Path("runs")], state_dir or [])
    backups.write(archive, parts)
    _show_parts(f"{archive} keeps", parts)


@app.command(epilog="Example: corolla cluster restore lab-monday.tar")
def restore(
    archive: Annotated[Path, typer.Argument(metavar="FILE.tar", help="An archive of `backup`.")], quiet: Quiet = False
) -> None:
    """Put everything in a backup back at its path. Existing files are never overwritten."""
    from deploy import backup as backups

    _show_parts("restored", backups.read(archive))


def _show_parts(what: str, parts: list[KeptPath]) -> None:
    _say("\n".join([f"{what}:", *(f"  {part.what}: {part.path}" for part in parts)]))


def _running(inventory: str) -> Cluster:
    from deploy import cluster
    from deploy import inventory as inventories

    path = Path(inventory)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise DeploymentError(key=path, rule="there is no such file; a running cluster's name works too")
        return cluster.load(inventories.read_inventory(path).name)
    return cluster.load(inventory)


def _key(running: Cluster, name: str) -> str:
    """Return the fingerprint of a SuperNode's key, "" if it has none."""
    from deploy import certificates

    path = Path(running.inventory.keys) / f"{name}.pub"
    return certificates.fingerprint(path.read_bytes()) if running.inventory.secure and path.is_file() else ""


def _gpu(gpu: str | None) -> str:
    return "any" if gpu is None else gpu or "none"


def _say(text: str) -> None:
    """Print a line, unless the command that runs was called with --quiet."""
    context = click.get_current_context(silent=True)
    if context is None or not context.params.get("quiet"):
        typer.echo(log_format.now("launcher", "info", text) if log_format.is_json() else text)
