"""Pins of source tables, with the runs that need them and the files that only they hold."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pyiceberg.manifest import ManifestContent, ManifestFile
from pyiceberg.table import Table

from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.iceberg.columns import expect
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.pins import PinUse, RunRows, plans_of, read_plans, read_runs, uses_of
from dlac_pipeline.lakehouse.iceberg.snapshots import pin_tag, table_name
from dlac_pipeline.lakehouse.ledger.typed_rows import Columns

_PREFIX = pin_tag(0).removesuffix("0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """A pinned snapshot of a table. Its held data files are reached by no other tag and by no branch."""

    table: str
    snapshot_id: int
    tag: str
    committed_at: datetime
    """Moment at which the snapshot was made."""
    pinned_at: datetime | None
    """Moment at which the first plan of it was made, or None."""
    plan_ids: tuple[str, ...]
    uses: tuple[PinUse, ...]
    held_files: int
    held_bytes: int

    @property
    def needed_by(self) -> tuple[str, ...]:
        """The runs that need it."""
        return tuple(use.run for use in self.uses if use.needed)


def list_pins(lakehouse: Lakehouse, identifier: str | None = None) -> list[Pin]:
    """The pins of one table, or of every planned one, the oldest snapshot first. Raises `NoSuchTable`."""
    plans = read_plans(lakehouse)
    runs = read_runs(lakehouse)
    if identifier is not None:
        return _pins_of(lakehouse.load(identifier), identifier, plans, runs)
    found: list[Pin] = []
    for name in sorted({str(plan["source_table"]) for plan in plans}):
        try:
            table = lakehouse.load(name)
        except errors.NoSuchTable:  # dropped since: there is nothing left to hold back
            continue
        found += _pins_of(table, name, plans, runs)
    return found


def pins_table(lakehouse: Lakehouse, run_or_table: str | None = None) -> list[Pin]:
    """Return the pins that a run uses, or else the pins of a table, or all pins. Raises `NoSuchTable` for another name."""
    if run_or_table is not None and run_or_table not in read_runs(lakehouse):
        return list_pins(lakehouse, run_or_table)
    pins = list_pins(lakehouse)
    return [one for one in pins if run_or_table is None or any(use.run == run_or_table for use in one.uses)]


def _pins_of(table: Table, name: str, plans: Sequence[Columns], runs: Mapping[str, RunRows]) -> list[Pin]:
    files_of = _held_by_one(table)
    found = []
    for tag, ref in table.refs().items():
        snapshot = table.snapshot_by_id(ref.snapshot_id)
        if not tag.startswith(_PREFIX) or snapshot is None:
            continue
        mine = plans_of(table, ref.snapshot_id, plans)
        files = files_of.get(tag, {})
        one = Pin(
            table=name,
            snapshot_id=ref.snapshot_id,
            tag=tag,
            committed_at=datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC),
            pinned_at=min((plan["created_at"] for plan in mine), default=None),
            plan_ids=tuple(sorted(plan["plan_id"] for plan in mine)),
            uses=uses_of(table, ref.snapshot_id, plans, runs),
            held_files=len(files),
            held_bytes=sum(files.values()),
        )
        found.append(one)
    return sorted(found, key=lambda one: (one.committed_at, one.snapshot_id))


def _held_by_one(table: Table) -> dict[str, dict[str, int]]:
    """Return ref -> the data files (path -> bytes) that nothing else reaches. Empty unless a pin alone holds some."""
    if not any(name.startswith(_PREFIX) for name in table.refs()):
        return {}
    manifests: dict[str, ManifestFile] = {}
    reached_by: dict[str, list[str]] = defaultdict(list)
    with expect(f"the manifests of table {table_name(table)!r}", "restore them"):
        for name, ref in table.refs().items():
            snapshot = table.snapshot_by_id(ref.snapshot_id)
            for manifest in snapshot.manifests(table.io) if snapshot is not None else ():
                if manifest.content == ManifestContent.DATA:
                    manifests[manifest.manifest_path] = manifest
                    reached_by[manifest.manifest_path].append(name)
        alone = {names[0] for names in reached_by.values() if len(names) == 1}
        if not any(name.startswith(_PREFIX) for name in alone):  # the usual case: no file is held back yet
            return {}
        only: dict[str, str | None] = {}
        sizes: dict[str, int] = {}
        for path, manifest in manifests.items():
            owner = reached_by[path][0] if len(reached_by[path]) == 1 else None
            for entry in manifest.fetch_manifest_entry(table.io):
                file = entry.data_file
                only[file.file_path] = owner if only.get(file.file_path, owner) == owner else None
                sizes[file.file_path] = file.file_size_in_bytes
    files_of: dict[str, dict[str, int]] = defaultdict(dict)
    for path, owner in only.items():
        if owner is not None:
            files_of[owner][path] = sizes[path]
    return files_of
