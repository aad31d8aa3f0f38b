"""`corolla node`: commands for a site's people, on its own machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from fl_app import exit_codes
from fl_app.errors import DeploymentError, UserError, counted, plain
from fl_app.keys import Scalar

app = typer.Typer(
    no_args_is_help=True, help="A site's own side: join a cluster, decide which runs may run here, audit."
)

peers_app = typer.Typer(no_args_is_help=True, help="The list of all sites' keys, for private runs.")
app.add_typer(peers_app, name="peers")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The site's name on this machine.")]
Only = Annotated[str | None, typer.Option("--name", help="Only this site, if this machine has several.")]


@app.command(epilog="Example: corolla node join bern")
def join(name: Name) -> None:
    """Make this site's key, which stays here, and name its public half for the server's operator."""
    from deploy import joining

    directory = _directory(name)
    public = joining.make_key(directory)
    typer.echo(f"send {public} to the server's operator (nothing in it is secret):\n{public.read_text().strip()}")
    typer.echo(
        "the operator runs: corolla cluster admit CLUSTER.yaml CLIENT FILE.pub, and sends back the invitation it writes"
    )
    typer.echo(f"then run here: corolla node start {name} --invitation FILE")


@app.command(epilog="Example: corolla node rotate bern")
def rotate(name: Name) -> None:
    """Replace this site's key by another one. The SuperNode needs the new one once the server has taken it in."""
    from deploy import joining

    public = joining.rotate_key(_directory(name))
    typer.echo(f"send {public} to the server's operator (nothing in it is secret):\n{public.read_text().strip()}")
    typer.echo(
        "the operator runs: corolla cluster rotate CLUSTER.yaml CLIENT FILE.pub. A SuperNode that runs keeps the old key until "
        f"then; start it again afterwards: corolla node start {name}"
    )


@app.command(epilog="Example: corolla node start bern")
def start(
    name: Name,
    invitation: Annotated[
        Path | None, typer.Option(help="The invitation from the server's operator; kept for later starts.")
    ] = None,
    peers: Annotated[
        Path | None, typer.Option(help="The list of all sites' keys, for private runs; kept for later starts.")
    ] = None,
    data_path: Annotated[str, typer.Option(help="This site's own data, for `dataset=node`.")] = "",
    site: Annotated[
        str | None, typer.Option(help="The site's rules. Without it the usual site.toml, if there is one.")
    ] = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Fork applications from a process that has imported PyTorch (0.4 GB).")
    ] = False,
    log_lines: Annotated[
        str, typer.Option("--log-format", metavar="text|json", help="The SuperNode's log lines.")
    ] = "",
) -> None:
    """Run this site's SuperNode, until Ctrl-C."""
    from deploy import joining, supernode
    from deploy.inventory import OWN
    from fl_app import log_format
    from fl_app.processes import flower_environment

    log_format.choose(log_lines)
    if site == "":
        raise DeploymentError(
            key="--site", rule="must name the site's rules, got an empty text; leave the option out to have none"
        )
    directory = _directory(name)
    if peers:
        typer.echo(
            f"{peers}: sha256 {joining.keep_peers(directory, peers)}; ask the other sites for theirs, it must be the same"
        )
    accepted = joining.accept_invitation(directory, invitation)
    if note := joining.transport_note(accepted):
        typer.echo(f"note: {note}", err=True)
    options = joining.supernode_options(directory, accepted, data_path)
    os.environ.update(flower_environment(directory / "flwr"))
    (directory / "flwr").mkdir(mode=0o700, exist_ok=True)
    supernode.run(name, site or "", options, OWN if warm else "")


@peers_app.command("accept", epilog="Example: corolla node peers accept bern --peers peers.txt")
def accept_peers(
    name: Name,
    peers: Annotated[
        Path | None, typer.Option(help="The new list of all sites' keys. Without it the list that is there already.")
    ] = None,
    sha256: Annotated[
        str, typer.Option("--sha256", help="The list's SHA-256 as the sites have compared it; another one is refused.")
    ] = "",
    site: Annotated[str, typer.Option(help="The site's rules. Without it the usual site.toml, if there is one.")] = "",
) -> None:
    """Agree to a changed list of all sites' keys; until then this site takes no part in private runs."""
    from deploy import joining
    from deploy import site as rules
    from deploy.supernode import use_rules

    use_rules(rules.find(site))
    before, found = joining.accept_peers(_directory(name), peers, sha256)
    was = f"before it was {before}" if before not in ("", found) else "as before" if before else "the first one"
    typer.echo(f"{name} agrees to the list with sha256 {found} ({was}); the other sites must have the same")


@app.command(epilog="Example: corolla node backup bern-monday.tar")
def backup(
    archive: Annotated[
        Path, typer.Argument(metavar="FILE.tar", help="The archive to write; only its owner can read it.")
    ],
    state_dir: Annotated[
        list[Path] | None, typer.Option("--state-dir", help="Another directory of client state. Repeatable.")
    ] = None,
) -> None:
    """Keep what the sites of this machine need if it is lost: keys, audit, client state, notes of spent budgets."""
    from deploy import backup as backups

    parts = backups.of_site(state_dir or [])
    backups.write(archive, parts)
    typer.echo("\n".join([f"{archive} keeps:", *(f"  {part.what}: {part.path}" for part in parts)]))


@app.command(epilog="Example: corolla node restore bern-monday.tar")
def restore(archive: Annotated[Path, typer.Argument(metavar="FILE.tar", help="An archive of `backup`.")]) -> None:
    """Put everything in a backup back at its path. Existing files are never overwritten."""
    from deploy import backup as backups

    typer.echo("\n".join(["restored:", *(f"  {part.what}: {part.path}" for part in backups.read(archive))]))


@app.command(epilog="Example: corolla node approve 1234567890")
def approve(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="The run's id; without it, list the runs that wait.")
    ] = None,
    decline: Annotated[bool, typer.Option("--decline", help="Refuse it instead.")] = False,
    name: Only = None,
    whole: Annotated[bool, typer.Option("--all", help="List every key, also those with their default.")] = False,
) -> None:
    """Approve or decline a run that waits for this site; without RUN, list the waiting runs."""
    from deploy import site as rules

    found = {site: rules.waiting(directory) for site, directory in _sites(name).items()}
    if run is None:
        for site, requests in found.items():
            for request in requests:
                # the server wrote all of it: no text may hide a line or look like another
                by = f", submitted by {plain(request.submitter)[:80]}" if request.submitter else ""
                typer.echo(f"run {request.run} at {site}{by}: application {request.application}")
                shown = request.config if whole else request.telling
                lines = [line for key, value in shown.items() for line in _lines(key, value)]
                if more := len(request.config) - len(shown):
                    lines.append(f"  and {counted(more, 'key')} with the default of this installation: --all")
                typer.echo("\n".join(lines))
        if not any(found.values()):
            typer.echo("no run waits for approval")
        return
    waiting = [site for site, requests in found.items() if run in (request.run for request in requests)]
    if not waiting:
        others = sorted({request.run for requests in found.values() for request in requests})
        raise DeploymentError(
            key=f"run {run}", rule=f"does not wait for approval here; waiting: {', '.join(others) or 'none'}"
        )
    for site in waiting:
        rules.decide(_directory(site), run, not decline)
        typer.echo(f"run {run} is {'declined' if decline else 'approved'} at {site}")


@app.command(epilog="Example: corolla node audit bern")
def audit(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One site; without it all on this machine.")
    ] = None,
    expect: Annotated[str, typer.Option(help="A last hash noted earlier: the audit must still contain it.")] = "",
) -> None:
    """Check that the audit is unchanged. Exit with code 1 if a byte was changed or a line removed."""
    from deploy import audit as audits

    broken = False
    for site, directory in _sites(name).items():
        try:
            chain = audits.verify(directory)
        except UserError as error:
            typer.echo(f"{site}: {error}", err=True)
            broken = True
            continue
        if expect and expect not in chain.hashes:
            typer.echo(f"{site}: {directory / audits.FILE} does not contain {expect}", err=True)
            broken = True
            continue
        typer.echo(
            f"{site}: {len(chain.hashes)} lines, intact; the last hash is {chain.last} ({directory / audits.FILE})"
        )
    if broken:
        raise typer.Exit(exit_codes.FAILED)


@app.command(epilog="Example: corolla node application")
def application() -> None:
    """Print the sha256 of the application that `corolla run` submits, for `applications` in site.toml."""
    from fl_app.transport.app_bundle import application_hash

    typer.echo(application_hash({}))


def _lines(key: str, value: Scalar) -> list[str]:
    """Return a key of a waiting run, as wide as the terminal. A line that goes on has a mark: it cannot look like a key."""
    width = max(40, shutil.get_terminal_size().columns)
    text = plain(f"  {key} = {value}")
    return [text[:width], *(f"    | {text[at : at + width - 6]}" for at in range(width, len(text), width - 6))]


def _directory(name: str) -> Path:
    from deploy.supernode import OF_APPLICATIONS, sites_directory

    if not name or any(part in ("", ".", "..", *OF_APPLICATIONS) for part in name.split("/")):
        raise DeploymentError(key=f"{name!r}", rule="is not a site's name")
    return sites_directory() / name


def _sites(name: str | None) -> dict[str, Path]:
    """Return the sites that ran on this machine, by name, or only the named one. Raises UserError if none did."""
    from deploy.supernode import sites_directory, sites_in

    found = {name: sites_directory() / name for name in sites_in(sites_directory())}
    if name is not None:
        found = {site: path for site, path in found.items() if site == name}
    if not found:
        raise DeploymentError(
            key=name or "no site", rule=f"there is no audit under {sites_directory()}; has its SuperNode been started?"
        )
    return found
