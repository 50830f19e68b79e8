"""Schemas of DLAC's tables and the version of everything that is persisted.

Promise: a table or manifest of an older format version stays readable. Columns are only added, as optional ones.
"""

from collections.abc import Mapping

from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DoubleType, IcebergType, ListType, LongType, NestedField, StructType

FORMAT_VERSION = 1
FORMAT_VERSION_PROPERTY = "dlac.format-version"
LEDGER_UUID_PROPERTY = "dlac.ledger-uuid"
"""Property of a rebuilt table that has another uuid: the uuid of the lost one, which manifests name."""


def _schema(columns: str, *, lists: Mapping[str, IcebergType] | None = None, required: str = "") -> Schema:
    """Return the schema of columns that are written as in SQL. The place of a column is its field id: append only.

    `lists` has the types of the columns of type `list`.
    """
    written = [column.split() for column in columns.split(",")]
    return Schema(
        *(
            NestedField(field_id, name, lists[name] if lists and kind == "list" else kind, required=name == required)
            for field_id, (name, kind) in enumerate(written, start=1)
        )
    )


def _list_of(field_id: int, element: IcebergType) -> ListType:
    return ListType(field_id, element, element_required=False)


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
    dead list
    """,
    lists={
        "dead": _list_of(100, StructType(NestedField(101, "first", LongType()), NestedField(102, "rows", LongType())))
    },
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
    step long, leg int, committed_at timestamptz, world_size int, manifest_uri string, manifest_digest string,
    model_digest string, applied_steps long, skipped_steps long, losses list, plan_id string, cut_id string, pass int,
    key_group int, source int, block int, position_start long, position_end long, first_step long, last_step long,
    rows_consumed long, rows_dead long, rows_quarantined long, token_start long, token_end long, applied boolean,
    detail string, format_version int, rows_filtered long, filtered list, quarantined list
    """,
    lists={
        "losses": _list_of(100, DoubleType()),
        "filtered": _list_of(110, LongType()),
        "quarantined": _list_of(111, LongType()),
    },
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
    """Return the identity of an own table: the uuid of the table that it was rebuilt from, or its own."""
    return table.properties.get(LEDGER_UUID_PROPERTY) or str(table.metadata.table_uuid)
