from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema

from catalog.connect import connect
from catalog.recoveries import Recovery, recoveries_of, write_recovery
from catalog.schemas import RECOVERIES

if TYPE_CHECKING:
    from tests.conftest import Arena

NEW = ("schedule_s", "convert_s", "work_lost_s")


def test_a_table_of_an_older_version_gets_its_new_columns(arena: Arena) -> None:
    """Its rows stay readable and do not know them; new rows have them; opening it again changes nothing."""
    old = Schema(*(field for field in RECOVERIES.fields if field.name not in NEW))
    arena.lakehouse.catalog.drop_table("dlac.recoveries")
    table = arena.lakehouse.catalog.create_table("dlac.recoveries", old, properties={"dlac.format-version": "1"})
    row = dict.fromkeys((field.name for field in old.fields), None)
    row |= {"run": "r", "seq": 1, "attempt": 2, "outcome": "resumed", "failed_at": datetime(2026, 1, 1, tzinfo=UTC)}
    table.append(pa.Table.from_pylist([row], schema=schema_to_pyarrow(old, include_field_ids=False)))
    lakehouse = connect(arena.lakehouse.config)
    evolved = lakehouse.own("recoveries")
    assert [(field.name, field.field_id) for field in evolved.schema().fields] == [
        (field.name, field.field_id) for field in RECOVERIES.fields
    ]
    (known,) = recoveries_of(lakehouse, "r")
    assert [getattr(known, name) for name in NEW] == [None] * 3
    numbers: dict[str, Any] = dict.fromkeys(
        ("detect_s", "stop_s", "claim_s", "verify_s", "load_s", "first_step_s", "total_s"), 0.5
    )
    new = Recovery(
        run="r",
        seq=3,
        attempt=3,
        replaced_attempt=2,
        cause="SIGKILL",
        noticed_by="recovery_sensor",
        failed_at=datetime(2026, 1, 2, tzinfo=UTC),
        resumed_from=None,
        resumed_step=0,
        rows_replayed=44,
        outcome="failed again",
        schedule_s=4.0,
        convert_s=2.0,
        work_lost_s=7.5,
        **numbers,
    )
    write_recovery(lakehouse, new)
    assert recoveries_of(lakehouse, "r") == [known, new]
    location = lakehouse.own("recoveries").metadata_location
    assert connect(arena.lakehouse.config).own("recoveries").metadata_location == location
