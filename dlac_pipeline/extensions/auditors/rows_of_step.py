"""The macro `rows_of_step` of `dlac sql`: the rows that a step trained on, computed from the order."""

import re
from collections.abc import Callable
from dataclasses import fields

import duckdb
import pyarrow as pa

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.steps.step_rows import StepRow, StepRows

_NAMES = [each.name for each in fields(StepRow) if each.name != "value"]
_TEXTS = ("run", "node", "source_table", "plan_id", "file_path")
_VIEW = pa.schema([(name, pa.string() if name in _TEXTS else pa.int64()) for name in _NAMES])
_MACRO = "rows_of_step"
_ANY_CALL = re.compile(_MACRO + r"\s*\(", re.IGNORECASE)
_CALL = re.compile(_MACRO + r"\s*\(\s*'((?:[^']|'')+)'\s*,\s*(\d+)\s*\)", re.IGNORECASE)


def define_rows_of_step(
    connection: duckdb.DuckDBPyConnection, lakehouse: Lakehouse, query: str, spec_of: Callable[[str], JobSpec | None]
) -> None:
    """Define the macro `rows_of_step('RUN', STEP)` for the calls in a query, with the columns of `StepRow` but `value`.

    `spec_of` returns the job spec that is given for a run. Raise `SpecInvalid` if the macro's arguments are no literals.
    """
    found = _CALL.findall(query)
    if not found or len(found) < len(_ANY_CALL.findall(query)):
        raise SpecInvalid(f"expected literals as in FROM {_MACRO}('my-run', 4210), found other arguments in {query!r}")
    calls = sorted({(run.replace("''", "'"), int(step)) for run, step in found})
    rows = [row.to_json() for run, step in calls for row in StepRows(lakehouse, run, spec=spec_of(run)).of(step)]
    connection.register("computed_rows_of_steps", pa.Table.from_pylist(rows, schema=_VIEW))
    connection.execute(
        f"CREATE OR REPLACE MACRO {_MACRO}(of_run, of_step) AS TABLE "
        "FROM computed_rows_of_steps WHERE run = of_run AND step = of_step"
    )
