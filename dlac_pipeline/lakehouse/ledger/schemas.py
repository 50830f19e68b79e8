"""Schemas of DLAC's tables and the version of everything that is persisted.

Promise: a table or manifest of an older format version stays readable. Columns are only added, as optional ones.
"""

from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BooleanType,
    DoubleType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)

FORMAT_VERSION = 1
FORMAT_VERSION_PROPERTY = "dlac.format-version"


def _fields(*columns: tuple[str, IcebergType], required: frozenset[str] = frozenset()) -> list[NestedField]:
    return [
        NestedField(field_id, name, column_type, required=name in required)
        for field_id, (name, column_type) in enumerate(columns, start=1)
    ]


def _partitioned_by(schema: Schema, name: str) -> PartitionSpec:
    source = schema.find_field(name).field_id
    return PartitionSpec(PartitionField(source_id=source, field_id=1000, transform=IdentityTransform(), name=name))


PLANS = Schema(
    *_fields(
        ("plan_id", StringType()),
        ("write_id", StringType()),
        ("source_table", StringType()),
        ("table_uuid", StringType()),
        ("snapshot_id", LongType()),
        ("tag", StringType()),
        ("schema_id", IntegerType()),
        ("row_filter", StringType()),
        ("columns", StringType()),
        ("units", LongType()),
        ("rows", LongType()),
        ("live_rows", LongType()),
        ("bytes", LongType()),
        ("created_at", TimestamptzType()),
        ("format_version", IntegerType()),
        ("exclude", StringType()),
        ("base_plan_id", StringType()),
    )
)

_DEAD_RANGE = StructType(NestedField(101, "first", LongType()), NestedField(102, "rows", LongType()))

WORK_UNITS = Schema(
    *_fields(
        ("write_id", StringType()),
        ("unit", LongType()),
        ("file_path", StringType()),
        ("row_group", IntegerType()),
        ("first_row", LongType()),
        ("rows", LongType()),
        ("live_rows", LongType()),
        ("bytes", LongType()),
        ("dead", ListType(100, _DEAD_RANGE, element_required=False)),
    )
)

SLICES = Schema(
    *_fields(
        ("cut_id", StringType()),
        ("plan_id", StringType()),
        ("pass", IntegerType()),
        ("key_group", IntegerType()),
        ("block", IntegerType()),
        ("slice", IntegerType()),
        ("unit", LongType()),
        ("first_row", LongType()),
        ("rows", LongType()),
        ("live_rows", LongType()),
        ("base", LongType()),
        ("block_rows", LongType()),
        ("block_live_rows", LongType()),
        ("a", LongType()),
        ("a_inv", LongType()),
        ("c", LongType()),
    )
)

CONSUMPTION = Schema(
    *_fields(
        ("run", StringType()),
        ("seq", LongType()),
        ("kind", StringType()),
        ("attempt", IntegerType()),
        ("nonce", StringType()),
        ("checkpoint_id", StringType()),
        ("parent", StringType()),
        ("head_after", StringType()),
        ("step", LongType()),
        ("leg", IntegerType()),
        ("committed_at", TimestamptzType()),
        ("world_size", IntegerType()),
        ("manifest_uri", StringType()),
        ("manifest_digest", StringType()),
        ("model_digest", StringType()),
        ("applied_steps", LongType()),
        ("skipped_steps", LongType()),
        ("losses", ListType(100, DoubleType(), element_required=False)),
        ("plan_id", StringType()),
        ("cut_id", StringType()),
        ("pass", IntegerType()),
        ("key_group", IntegerType()),
        ("source", IntegerType()),
        ("block", IntegerType()),
        ("position_start", LongType()),
        ("position_end", LongType()),
        ("first_step", LongType()),
        ("last_step", LongType()),
        ("rows_consumed", LongType()),
        ("rows_dead", LongType()),
        ("rows_quarantined", LongType()),
        ("token_start", LongType()),
        ("token_end", LongType()),
        ("applied", BooleanType()),
        ("detail", StringType()),
        ("format_version", IntegerType()),
        ("rows_filtered", LongType()),
        ("filtered", ListType(110, LongType(), element_required=False)),
        ("quarantined", ListType(111, LongType(), element_required=False)),
        required=frozenset({"run"}),
    )
)

RECOVERIES = Schema(
    *_fields(
        ("run", StringType()),
        ("seq", LongType()),
        ("attempt", IntegerType()),
        ("replaced_attempt", IntegerType()),
        ("cause", StringType()),
        ("noticed_by", StringType()),
        ("failed_at", TimestamptzType()),
        ("resumed_from", StringType()),
        ("resumed_step", LongType()),
        ("rows_replayed", LongType()),
        ("detect_s", DoubleType()),
        ("stop_s", DoubleType()),
        ("claim_s", DoubleType()),
        ("verify_s", DoubleType()),
        ("load_s", DoubleType()),
        ("first_step_s", DoubleType()),
        ("total_s", DoubleType()),
        ("outcome", StringType()),
        ("format_version", IntegerType()),
        ("schedule_s", DoubleType()),
        ("convert_s", DoubleType()),
        ("work_lost_s", DoubleType()),
        required=frozenset({"run"}),
    )
)

TABLES: dict[str, tuple[Schema, PartitionSpec]] = {
    "plans": (PLANS, UNPARTITIONED_PARTITION_SPEC),
    "work_units": (WORK_UNITS, UNPARTITIONED_PARTITION_SPEC),
    "slices": (SLICES, UNPARTITIONED_PARTITION_SPEC),
    "consumption": (CONSUMPTION, _partitioned_by(CONSUMPTION, "run")),
    "recoveries": (RECOVERIES, _partitioned_by(RECOVERIES, "run")),
}
