"""Commands for upkeep: `dlac ledger upkeep`, `dlac table pins` and `dlac table unpin`."""

from dataclasses import asdict
from typing import Annotated

from typer import Argument, Option

from dlac_pipeline.audit.wording import format_age, format_bytes, format_count
from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.config import KEEP_SNAPSHOTS, MOST_SNAPSHOTS


@ui.extension_command("dlac table pins", "dlac table pins my-run", "dlac table pins lake.documents")
def pins(
    name: Annotated[str | None, Argument(help="A run or a table. Unset: all pins.")] = None,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """List the pins of planned snapshots: age, the runs that need them, and the snapshots and files that only they keep."""
    from dlac_pipeline.extensions.upkeep.pins import pins_table

    found = pins_table(ui.lakehouse_of(spec, home), name)
    if as_json:
        ui.show_json([asdict(pin) for pin in found])
        return
    names = ("table", "snapshot", "made", "pinned", "holds back", "needed by", "other runs")
    rows = []
    for pin in found:
        held = f"{format_count(pin.held_files, 'file')}, {format_bytes(pin.held_bytes)}"
        files = held if pin.held_files else "nothing"
        others = ", ".join(use.run for use in pin.uses if not use.needed)
        ages = format_age(pin.committed_at), format_age(pin.pinned_at)
        rows.append((pin.table, str(pin.snapshot_id), *ages, files, ", ".join(pin.needed_by), others))
    ui.show_table(names, rows, right=("snapshot",), empty="no snapshot is pinned")


@ui.extension_command("dlac table unpin lake.documents 1287862416068212033")
def unpin(
    table: Annotated[str, Argument(help="The source table, as namespace.table.")],
    snapshot_id: Annotated[int, Argument(help="The pinned snapshot, as `dlac table pins` shows it.")],
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    force: Annotated[
        bool, Option(help="Release it even if a run needs it. That run cannot resume or be rewound then.")
    ] = False,
) -> None:
    """Release a pinned snapshot. Expiry may then remove files that only this pin kept."""
    from dlac_pipeline.lakehouse.iceberg.pins import remove_pin

    removed = remove_pin(ui.lakehouse_of(spec, home), table, snapshot_id, force=force)
    ui.show_text(f"snapshot {snapshot_id} of {table} {'is not pinned any more' if removed else 'was not pinned'}")


@ui.extension_command("dlac ledger upkeep", "dlac ledger upkeep --keep 5")
def upkeep(
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    keep: Annotated[
        int, Option(min=1, max=MOST_SNAPSHOTS, help="Snapshots to keep of each of DLAC's own tables.")
    ] = KEEP_SNAPSHOTS,
    as_json: ui.AsJson = False,
) -> None:
    """Merge small files of DLAC's own tables, expire snapshots, and remove unneeded files. Safe while runs train."""
    from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep as put_in_order

    done = put_in_order(ui.lakehouse_of(spec, home), keep=keep)
    if as_json:
        ui.show_json([asdict(each) for each in done])
        return
    names = ("files merged", "into", "snapshots expired", "files removed", "size")
    rows = []
    for each in done:
        name = f"{each.table} (busy)" if each.busy else each.table
        counts = (each.merged_files, each.into_files, each.expired_snapshots, each.removed_files)
        rows.append((name, *(f"{count:,}" for count in counts), format_bytes(each.removed_bytes)))
    ui.show_table(("table", *names), rows, right=names, empty="there is no table")
    if any(each.busy for each in done):
        ui.OUT.print("busy: others committed so often that something was left for the next time", soft_wrap=True)
