from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema

from dlac_pipeline.dagster.assets.pages import model_page
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import PHASES, Recovery, recoveries_of, write_recovery
from dlac_pipeline.lakehouse.ledger.schemas import RECOVERIES
from tests.integration.test_cli import dlac

if TYPE_CHECKING:
    from tests.conftest import Arena

NEW = ("schedule_s", "convert_s", "work_lost_s")


def recovery(run: str, *, seq: int) -> Recovery:
    """One by a sensor onto another number of ranks: each phase took some time."""
    numbers: dict[str, Any] = {f"{phase}_s": 0.5 for phase in PHASES}
    return Recovery(
        run=run,
        seq=seq,
        attempt=3,
        replaced_attempt=2,
        cause="SIGKILL",
        noticed_by="recovery_sensor",
        failed_at=datetime(2026, 1, 2, tzinfo=UTC),
        resumed_from=None,
        resumed_step=0,
        rows_replayed=44,
        outcome="failed again",
        work_lost_s=7.5,
        **numbers,
    )


def test_older_table_gets_new_columns(arena: Arena) -> None:
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
    new = recovery("r", seq=3)
    write_recovery(lakehouse, new)
    assert recoveries_of(lakehouse, "r") == [known, new]
    location = lakehouse.own("recoveries").metadata_location
    assert connect(arena.lakehouse.config).own("recoveries").metadata_location == location


@pytest.mark.filterwarnings("ignore")  # Dagster's own libraries warn of each other
def test_phases_are_recorded_in_order(arena: Arena) -> None:
    """A sensor notices, the new launch is started, and only that one waits for the end of the old processes."""
    happen = ["detect", "schedule", "stop", "claim", "verify", "convert", "load", "first step", "total"]
    claim(Ledger(arena.lakehouse), "r", nonce="n", replaces=0, detail={})
    write_recovery(arena.lakehouse, recovery("r", seq=1))
    shown = dlac("incidents", "r", home=arena.home)
    printed = " ".join(shown.stdout.split())  # a line is folded where the terminal ends
    phases = happen[:-1]  # the total is printed ahead of them
    assert [phase for _, phase in sorted((printed.index(f"{phase} 0.5 s"), phase) for phase in phases)] == phases
    (told,) = json.loads(dlac("incidents", "r", "--json", home=arena.home).stdout)
    page = model_page(arena.lakehouse, "r")
    (record,) = page["incidents"].value.records
    assert [each.data["attempt"] for each in page["last_attempts"].value.records] == [1]
    for columns in (told, record.data):
        assert [name for name in columns if name.removesuffix("_s") in PHASES] == [
            f"{phase.replace(' ', '_')}_s" for phase in happen
        ]
