"""The commands of `corolla cluster up` as text, for another tool or a person, and a Slurm job script."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from deploy import certificates, commands, connection
from deploy.commands import HostPlaces
from deploy.detached import cluster_directory
from deploy.inventory import LOCAL, Inventory, SuperNode, is_loopback
from deploy.peers import KEY_SUFFIX
from fl_app import shell
from fl_app.errors import DeploymentError
from fl_app.privacy.keyring import PEERS
from fl_app.processes import FLOWER, LAUNCH, script

# under the home of another host's user
_THERE = ".local/state/corolla/clusters"

# Host by host ---------------------------------------------------------------------------------------------------------


def by_host(inventory: Inventory) -> str:
    """Return shell text: every host's commands, in the order to run them. Commands that stay running end in ` &`."""
    link = inventory.superlink
    blocks = [_host(inventory, link.host, link.python, superlink=True)]
    if link.host != LOCAL:
        ca = f"{inventory.keys}/{certificates.CA}" if inventory.secure else ""
        blocks.append(
            ["# here: the SuperLink's control port", f"{shell.line(commands.tunnel(inventory, ca).command)} &"]
        )
    blocks.append(_connection(inventory))
    pythons = {node.host: node.python for node in inventory.supernodes}
    blocks += [_host(inventory, host, python, superlink=False) for host, python in pythons.items()]
    blocks.append(_run(inventory))
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _host(inventory: Inventory, host: str, python: str, *, superlink: bool) -> list[str]:
    """Return the commands that start a host's SuperLink, or its SuperNodes."""
    place, nodes = _place(inventory, host, python), [node for node in inventory.supernodes if node.host == host]
    if superlink:
        processes, keys = [commands.superlink(inventory, place)], [certificates.SERVER, certificates.SERVER_KEY]
    else:
        processes = [commands.supernode(inventory, node, place, k) for k, node in enumerate(nodes)]
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
    link, count = inventory.superlink, commands.num_ports(inventory, host)
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
    process = commands.superlink(moved, place)
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
    process = commands.supernode(inventory, here, place, 0)
    return f"{node.client_id}) exec {shell.line(process.command, process.environment)} ;;"
