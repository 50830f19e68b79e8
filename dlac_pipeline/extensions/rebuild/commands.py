"""The command `dlac ledger rebuild`."""

from dataclasses import asdict
from typing import Annotated

import typer
from typer import Option

from dlac_pipeline.cli import shared as ui


@ui.extension_command("dlac ledger rebuild --dry-run", "dlac ledger rebuild")
def rebuild(
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Compare, and change nothing.")] = False,
    journal: Annotated[
        str | None,
        Option(help="Address of the journal. Unset: the folder data/journal in the location of the ledger's table."),
    ] = None,
    as_json: ui.AsJson = False,
) -> None:
    """Append the rows that the ledger lost, from its journal. Stop all launches first. Exit status 0 if nothing is lost.

    A lost or damaged table is made again. The other tables get the rows of their intact data files. No file is deleted.
    """
    from dlac_pipeline.checkpoint.store import tiers_of
    from dlac_pipeline.extensions.rebuild.damaged import connect_damaged
    from dlac_pipeline.extensions.rebuild.rebuild import rebuild_ledger

    job = None if spec is None else ui.resolved(spec, home)
    lakehouse = connect_damaged(ui.config_of(home) if job is None else job.lakehouse)
    files = None if job is None else tiers_of(job).files
    done = rebuild_ledger(lakehouse, journal=journal, dry_run=dry_run, files=files)
    if as_json:
        ui.show_json(asdict(done))
    else:
        rows = [(each.run, f"{each.appends:,}", f"{each.missing:,}", each.problem or "complete") for each in done.runs]
        counts = ("appends", "would be added" if dry_run else "added")
        ui.show_table(("run", *counts, "state"), rows, right=counts, empty="there is no run")
        ui.show_text("\n".join(f"{name}: {done.problems.get(name, what)}" for name, what in done.tables.items()))
    if not done.complete:
        raise typer.Exit(1)
