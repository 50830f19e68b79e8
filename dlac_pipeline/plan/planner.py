"""From a source to a plan: pin the snapshot, list its row groups, write them down as work units under a content id."""

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from blake3 import blake3
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import EmptyPlan, NoSuchColumn, SpecInvalid
from dlac_pipeline.lakehouse.filters.grammar import parse_filter
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.pins import hold
from dlac_pipeline.lakehouse.iceberg.row_groups import NO_CHECKS, ColumnChecks, FilesToRead, RowGroup, row_groups_of
from dlac_pipeline.lakehouse.iceberg.snapshots import schema_id_of, snapshot_of
from dlac_pipeline.lakehouse.iceberg.sources import check_data_files, load_version, name_outside
from dlac_pipeline.lakehouse.ledger.plans import WORK_UNITS_ARROW, PlanRow, find_plan, read_units, write_plan
from dlac_pipeline.plan.plan import Plan, unit_table
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.rows.columns import check_identity, check_names, kinds_of
from dlac_pipeline.rows.transform import ROW, load_transform
from dlac_pipeline.spec.job_spec import SourceSpec

ROW_KEYS = Door("dlac.row_keys", "writer of row keys")


class RowKeys(Protocol):
    """Keys of the rows of a source. The entry `keys` of the door is called as `row_keys_of`."""

    def write(self, snapshot_id: int, paths: set[str], *, older: bool) -> None:
        """Write the keys of a snapshot's data files that have none of the same columns, in one append.

        `older`: also of files that other plans of the table name, while they can be read. Raises `DataFileUnreadable`.
        """


def row_keys_of(lakehouse: Lakehouse, table: Table, schema: Schema, source: SourceSpec) -> RowKeys:
    """Return the keys of a source's rows. Raises `SpecInvalid` for rows without keys, or as `Door.load`."""
    keys: RowKeys = ROW_KEYS.load("keys", setting="source.row_keys")(lakehouse, table, schema, source)
    return keys


def make_plan(
    lakehouse: Lakehouse,
    source: SourceSpec,
    *,
    only: Collection[str] | None = None,
    dead: Mapping[str, Ints] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    write: bool = True,
    checks: ColumnChecks = NO_CHECKS,
) -> Plan:
    """Pin the snapshot and plan it. The same content gives the same plan, written once.

    `only` names the data files to plan. `dead` names further dead rows, as positions in a data file (path -> sorted int64).
    Without `write` nothing is pinned or written: the plan is for this process only, and may lose its data files.
    `checks` are compared with the footers.

    Raises:
        DataFileChanged: a registered Parquet file has changed under its name.
        BadInput: the table, snapshot, columns, transform or filter cannot be planned (see its subclasses).
        EmptyPlan: no row is live.
    """
    table = load_version(lakehouse, source.table, source.snapshot_id)
    check_data_files(table)
    snapshot = snapshot_of(table, source.snapshot_id, ref=source.ref)
    schema = check_source(table, source, snapshot)
    keys = row_keys_of(lakehouse, table, schema, source) if source.row_keys and write else None
    tag = hold(lakehouse, source.table, snapshot.snapshot_id, source.pin if write else "none")
    groups = row_groups_of(
        table,
        snapshot.snapshot_id,
        source.planned_filter,
        schema=schema,
        reads=FilesToRead(only=only, progress=progress),
        exclude=source.exclude,
        checks=checks,
    )
    name_outside(table, source.table, {group.file_path for group in groups})
    if dead:
        groups = [_without(group, dead[group.file_path]) if group.file_path in dead else group for group in groups]
    if not any(group.rows > len(group.dead) for group in groups):
        raise _no_live_rows(table, source, snapshot.snapshot_id, schema.schema_id, sum(group.rows for group in groups))
    if keys is not None:
        keys.write(snapshot.snapshot_id, {group.file_path for group in groups}, older=only is None)
    return find_or_write(
        lakehouse if write else None,
        groups,
        source_table=source.table,
        table_uuid=str(table.metadata.table_uuid),
        snapshot_id=snapshot.snapshot_id,
        tag=tag,
        schema_id=schema.schema_id,
        row_filter=source.planned_filter,
        columns=json.dumps(source.columns),
        exclude=json.dumps(source.exclude),
        base_plan_id=None,
    )


def check_source(table: Table, source: SourceSpec, snapshot: Snapshot) -> Schema:
    """Return the schema as which a snapshot is read, after checking all that is needed to read the source, except its rows.

    Raises:
        NoSuchColumn: the schema lacks a column of the source, of its filter or of its identity.
        UnsupportedColumn: a column cannot become a tensor.
        SpecInvalid: an identity column is not of a primitive type, a column has a name that transforms use, or the text of
            the filter is no filter.
        TransformFailed: the transform cannot be loaded.
        UnsupportedSnapshot: the table's metadata lack the schema.
    """
    schema, newest = table.schemas()[schema_id_of(table, snapshot)], table.schema()
    try:
        _check_schema(schema, source)
    except NoSuchColumn as err:
        if not _is_added(schema, newest, source):
            raise
        raise NoSuchColumn(
            f"{err}; snapshot {snapshot.snapshot_id} was written with schema {schema.schema_id}, and the table has a newer "
            f"schema, {newest.schema_id}, with that name: name columns as the snapshot does, or read a snapshot of the newer "
            "schema, such as the next append makes"
        ) from err
    return schema


def _check_schema(schema: Schema, source: SourceSpec) -> None:
    of_source = f"of source {source.label!r}"
    check_identity(schema, source.identity_columns, setting=f"identity_columns {of_source}")
    if source.transform and ROW in source.columns:
        raise SpecInvalid(f"expected columns of other names than {ROW!r}, which transforms use, found it: leave it out")
    for setting in ("columns",) if source.transform else ("columns", "ragged", "nullable"):
        check_names(schema, getattr(source, setting), setting=f"{setting} {of_source}")
    if source.transform:
        load_transform(source.transform)
    else:
        kinds_of(schema, source.columns, source.ragged, source.nullable)
    parse_filter(source.planned_filter, schema, setting="row_filter")


def _is_added(schema: Schema, newest: Schema, source: SourceSpec) -> bool:
    """Return whether the newest schema of the table has a name of the source that `schema` lacks."""
    added = {field.name for field in newest.fields} - {field.name for field in schema.fields}
    if added & {*source.columns, *source.identity_columns}:
        return True
    return _fits(newest, source.planned_filter) and not _fits(schema, source.planned_filter)


def _fits(schema: Schema, row_filter: str) -> bool:
    try:
        parse_filter(row_filter, schema)
    except NoSuchColumn:
        return False
    return True


def _no_live_rows(table: Table, source: SourceSpec, snapshot_id: int, schema_id: int, rows: int) -> EmptyPlan:
    """Return the error for a plan without live rows. It names the exclusions if the filter alone leaves some."""
    wanted = (
        f"expected live rows in snapshot {snapshot_id} of {source.table!r} under the filter {source.planned_filter!r}"
    )
    if source.exclude:
        kept = row_groups_of(table, snapshot_id, source.planned_filter, schema=table.schemas()[schema_id])
        if any(group.rows > len(group.dead) for group in kept):
            return EmptyPlan(f"{wanted}, found that the exclusions {source.exclude!r} leave none: exclude fewer rows")
    return EmptyPlan(f"{wanted}, found none of {rows}: widen the filter")


def find_or_write(lakehouse: Lakehouse | None, groups: list[RowGroup], **facts: Any) -> Plan:
    """Return the written plan of these units, and write it if it is new. Without a lakehouse it is not written."""
    content = {name: facts[name] for name in facts if name not in ("source_table", "tag")}
    content["units"] = _digest(groups)
    plan_id = blake3(json.dumps(content, sort_keys=True).encode()).hexdigest(length=12)
    if lakehouse is not None and (found := find_plan(lakehouse, plan_id)) is not None:
        return Plan(row=found, units=unit_table(read_units(lakehouse, found)))
    write_id = secrets.token_hex(8)
    row = PlanRow(
        plan_id=plan_id,
        write_id=write_id,
        units=len(groups),
        rows=sum(group.rows for group in groups),
        live_rows=sum(group.rows - len(group.dead) for group in groups),
        bytes=sum(group.bytes for group in groups),
        created_at=datetime.now(UTC),
        **facts,
    )
    units = _units_arrow(groups, write_id)
    return Plan(row=row if lakehouse is None else write_plan(lakehouse, row, units), units=unit_table(units))


def _without(group: RowGroup, positions: Ints) -> RowGroup:
    """The row group with the rows at these positions of its file dead, too."""
    inside = positions[(positions >= group.first_row) & (positions < group.first_row + group.rows)] - group.first_row
    return replace(group, dead=np.union1d(group.dead, inside).astype(np.int64))


def _digest(groups: list[RowGroup]) -> str:
    digest = blake3()
    for group in groups:
        digest.update(f"{group.file_path}\0{group.row_group}\0{group.first_row}\0{group.rows}\0".encode())
        digest.update(group.dead.tobytes())
    return digest.hexdigest()


def _units_arrow(groups: list[RowGroup], write_id: str) -> pa.Table:
    count = len(groups)
    files = [group.file_path for group in groups]
    names = ("row_group", "first_row", "rows", "bytes")
    numbers = {name: np.fromiter((getattr(group, name) for group in groups), np.int64, count) for name in names}
    live = np.fromiter((group.rows - len(group.dead) for group in groups), np.int64, count)
    numbers |= {"unit": np.arange(count, dtype=np.int64), "live_rows": live}
    dead = _runs([group.dead for group in groups]).cast(WORK_UNITS_ARROW.field("dead").type)
    columns = {"write_id": pa.repeat(write_id, count), "file_path": files, "dead": dead, **numbers}
    unknown = {field.name: pa.nulls(count, field.type) for field in WORK_UNITS_ARROW}
    return pa.table({**unknown, **columns}).select(WORK_UNITS_ARROW.names).cast(WORK_UNITS_ARROW)


def _runs(dead: Sequence[Ints]) -> pa.Array:
    """Return the sorted offsets of each unit as lists of runs of neighbors: {first, rows}."""
    begins = [np.flatnonzero(np.diff(offsets, prepend=offsets[:1] - 2) != 1) for offsets in dead]
    first = [offsets[at] for offsets, at in zip(dead, begins, strict=True)]
    rows = [np.diff(at, append=len(offsets)) for offsets, at in zip(dead, begins, strict=True)]
    runs = pa.StructArray.from_arrays([np.concatenate(first), np.concatenate(rows)], ["first", "rows"])
    return pa.ListArray.from_arrays(np.cumsum([0, *map(len, begins)]).astype(np.int32), runs)
