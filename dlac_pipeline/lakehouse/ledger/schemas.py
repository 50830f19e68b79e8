"""Schemas of DLAC's tables and the version of everything that is persisted.

Promise: tables and manifests of version 1 stay readable. Columns, and fields of structs, are only added, as optional ones.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import ListType, MapType, NestedField, StructType

FORMAT_VERSION = 1
FORMAT_VERSION_PROPERTY = "dlac.format-version"
LEDGER_UUID_PROPERTY = "dlac.ledger-uuid"
"""Property of a rebuilt table that has another uuid: the uuid of the lost one, which manifests name."""


def _schema(columns: str, *, required: str = "") -> Schema:
    """Return the schema of columns that are written as in SQL, with the field ids that a new table gets."""
    made = Schema(*_fields(columns, count(1), required))
    return assign_fresh_schema_ids(made)


def _fields(columns: str, ids: Iterator[int], required: str = "") -> list[NestedField]:
    named = [column.split(maxsplit=1) for column in _split(columns)]
    return [NestedField(next(ids), name, _type(kind, ids), required=name == required) for name, kind in named]


def _type(text: str, ids: Iterator[int]) -> Any:
    """Return a type: `list<TYPE>`, `map<TYPE, TYPE>`, `struct<NAME TYPE, ...>`, or the name of a primitive one."""
    kind, _, inner = text.strip().partition("<")
    if kind == "struct":
        return StructType(*_fields(inner[:-1], ids))
    if kind == "list":
        return ListType(next(ids), _type(inner[:-1], ids), element_required=False)
    if kind == "map":
        key, value = (_type(each, ids) for each in _split(inner[:-1]))
        return MapType(next(ids), key, next(ids), value, value_required=False)
    return kind


def _split(columns: str) -> list[str]:
    """Split at the commas outside of all brackets."""
    found, depth = [""], 0
    for each in columns:
        depth += (each == "<") - (each == ">")
        if each == "," and depth == 0:
            found.append("")
        else:
            found[-1] += each
    return found


def _partitioned_by(schema: Schema, name: str) -> PartitionSpec:
    source = schema.find_field(name).field_id
    return PartitionSpec(PartitionField(source_id=source, field_id=1000, transform=IdentityTransform(), name=name))


PLANS = _schema(
    """
    plan_id string, write_id string, source_table string, table_uuid string, snapshot_id long, tag string, schema_id int,
    row_filter string, columns string, units long, rows long, live_rows long, bytes long, created_at timestamptz,
    format_version int, exclude string, base_plan_id string
    """
)
WORK_UNITS = _schema(
    """
    write_id string, unit long, file_path string, row_group int, first_row long, rows long, live_rows long, bytes long,
    dead list<struct<first long, rows long>>
    """
)
SLICES = _schema(
    """
    cut_id string, plan_id string, pass int, key_group int, block int, slice int, unit long, first_row long, rows long,
    live_rows long, base long, block_rows long, block_live_rows long, a long, a_inv long, c long
    """
)
CONSUMPTION = _schema(
    """
    run string, seq long, kind string, attempt int, nonce string, checkpoint_id string, parent string, head_after string,
    step long, leg int, committed_at timestamptz, format_version int, world_size int, manifest_uri string,
    manifest_digest string, model_digest string, applied_steps long, skipped_steps long, losses list<double>,
    plan_id string, cut_id string, pass int, key_group int, source int, block int, position_start long, position_end long,
    first_step long, last_step long, rows_consumed long, rows_dead long, rows_filtered long, rows_quarantined long,
    token_start long, token_end long, applied boolean, filtered list<long>,
    quarantined list<long>, quarantine_reasons list<string>, reason string, name string, groups list<int>, leg_json string,
    checkpoint struct<
        bytes long, interval_s double, why string, total_steps long, adopted string, nodes list<string>,
        rank_nodes list<struct<node string, ranks int>>,
        phases map<string, double>, readers int, refers_to list<string>, stages int
    >,
    claim struct<
        replaces int, purpose string, origin string, host string, local string, store string, marks_commits boolean,
        launch_folder string, rendezvous string, launched_by string, memory_of int, memory_step long, memory_ranks int,
        memory_at double, memory_rows long, plan_ids list<string>, leg_plan_ids list<string>,
        planned list<struct<table_uuid string, snapshot_id long>>, memory_readers int,
        memory_stages int
    >,
    quarantined_rows struct<path string, row_group int, rows long, positions list<long>>,
    export struct<digest string, bytes long, file string, part string>,
    verify struct<verification string, problem string>,
    rewind struct<
        left_checkpoint string, left_step long, why string, exclude list<struct<source int, where string>>
    >,
    fork struct<parent_run string, parent_checkpoint string, parent_step long>
    """,
    required="run",
)
RECOVERIES = _schema(
    """
    run string, seq long, attempt int, replaced_attempt int, cause string, noticed_by string, failed_at timestamptz,
    resumed_from string, resumed_step long, rows_replayed long, detect_s double, stop_s double, claim_s double,
    verify_s double, load_s double, first_step_s double, total_s double, outcome string, format_version int,
    schedule_s double, convert_s double, work_lost_s double
    """,
    required="run",
)
ROW_KEYS = _schema("table_uuid string, identity string, salt string, file_path string, file long, key long, row long")
TABLES: dict[str, tuple[Schema, PartitionSpec]] = {
    "plans": (PLANS, UNPARTITIONED_PARTITION_SPEC),
    "work_units": (WORK_UNITS, UNPARTITIONED_PARTITION_SPEC),
    "slices": (SLICES, UNPARTITIONED_PARTITION_SPEC),
    "consumption": (CONSUMPTION, _partitioned_by(CONSUMPTION, "run")),
    "recoveries": (RECOVERIES, _partitioned_by(RECOVERIES, "run")),
    "row_keys": (ROW_KEYS, UNPARTITIONED_PARTITION_SPEC),
}


def ledger_uuid_of(table: Table) -> str:
    """Return the identity of an own table: the uuid of the table that it was rebuilt from, or the table's uuid."""
    return table.properties.get(LEDGER_UUID_PROPERTY) or str(table.metadata.table_uuid)
