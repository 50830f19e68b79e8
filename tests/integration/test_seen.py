"""Who has seen a document: the keys of rows against what was in the tensors."""

import json
import re
import shutil
from collections import Counter
from typing import Any
from uuid import uuid4

import duckdb
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable

from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.extensions.erasure.explain import explain_sql
from dlac_pipeline.extensions.erasure.seen import who_has_seen
from dlac_pipeline.extensions.exchange.fork import fork_run
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.conftest import Arena
from tests.fixtures import Command
from tests.integration.audit_runs import KINDS, TABLES, Workshop, changed, tokens_of, trained

_SEEN = """
SELECT r.row_id, s.checkpoint_id, s.whole, s.survives, s.applied
FROM (SELECT row_id, row_key(salt, identity, [row_id::VARCHAR]) AS key
    FROM (SELECT DISTINCT row_id FROM source_rows), (SELECT DISTINCT salt, identity FROM keyed_files)) AS r
JOIN seen_by(r.key) AS s ON true
WHERE s.run = $run
"""


class KeyedWorkshop(Workshop):
    """A workshop whose runs record keys of their rows."""

    def train(self, spec: dict[str, Any], **more: Any) -> None:
        """Train with keys of `row_id` for each source."""
        keyed = {"row_keys": True, "identity_columns": ["row_id"]}
        mixture = [{**source, **keyed} for source in spec.get("mixture", [])]
        super().train({**spec, "source": {**spec["source"], **keyed}, "mixture": mixture}, **more)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> KeyedWorkshop:
    """The lakehouse of this module's runs."""
    return KeyedWorkshop(tmp_path_factory.mktemp("seen") / "home")


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("packed", "transformed")),
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("mixed", "excluded", "followed")),
    ],
)
def test_seen_by_equals_tensors(shop: KeyedWorkshop, kind: str) -> None:
    """The checkpoints that have seen a row are those whose steps had it in a tensor. `keys_seen` has the rows of all of them."""
    trained(shop, kind)
    with open_audit(shop.lakehouse) as connection:
        shop.row_ids(connection, *TABLES[KINDS[kind]])
        steps = dict(connection.execute("SELECT step, checkpoint_id FROM lineage WHERE run = ?", [kind]).fetchall())
        wanted = {
            (row_id, steps[min(at for at in steps if at >= step)])
            for step, rows in shop.seen[kind].items()
            for row_id in rows
        }
        found = connection.execute(_SEEN, {"run": kind}).fetchall()
        assert {(row_id, checkpoint) for row_id, checkpoint, *_ in found} == wanted
        assert all(survives for *_, survives, _ in found)
        if kind == "packed":
            seen, tokens = shop.seen_until(kind, max(steps)), Counter(row_id for row_id, _, whole, *_ in found if whole)
            assert {row_id for row_id in seen if seen[row_id] == tokens_of(row_id)} == tokens.keys()
        keys = connection.execute(
            "SELECT DISTINCT row_id FROM keys_seen(?) AS k JOIN source_rows AS s ON s.file = bare_path(k.file_path) AND "
            "s.file_row = k.row",
            [steps[max(steps)]],
        )
        assert {row_id for (row_id,) in keys.fetchall()} == {row_id for row_id, _ in wanted}


def test_adopted_run_limits_answers(shop: KeyedWorkshop) -> None:
    """Of a run that began from a checkpoint of others, it is unknown what those had seen."""
    run = trained(shop, "packed")
    adopted = shop.forge(changed(lambda row: row["kind"] == "checkpoint", checkpoint={"adopted": "elsewhere"}), of=run)
    note = f"unknown for the rows that elsewhere had seen, with which run {adopted} began"
    assert [note in who_has_seen(shop.lakehouse, ["7"], run=each)["notes"] for each in (adopted, run, None)] == [
        True,
        False,
        True,
    ]


@pytest.mark.slow
def test_branches_are_seen_without_the_table(arena: Arena, here: Command) -> None:
    """After a rewind, a fork, a compaction, expiry, and a drop with all files, each reading of a row is found, and its heirs."""
    table = arena.table(appends=(300, 300))
    arena.table("src.u", appends=(64,))
    keyed: dict[str, Any] = {"row_keys": True, "identity_columns": ["row_id"], "world_size": 1}
    spec = arena.spec("a", passes=1, every_steps=4, **keyed)
    first = arena.train(spec, until=13)
    abandoned = {row.step: row.checkpoint_id for row in arena.rows("a", CheckpointRow)}
    rewind_run(arena.lakehouse, "a", nonce="n", target=8, exclude=["row_id >= 500"], spec=spec)
    second = arena.train(spec.model_copy(update={"launch": spec.launch.model_copy(update={"new_leg": True})}))
    fork_run(arena.lakehouse, arena.spec("b", table="src.u", passes=1, **keyed), "a", step=8)
    table.refresh().overwrite(table.scan().to_arrow())
    arena.train(arena.spec("b", table="src.u", passes=1, **keyed))
    for name in ("src.t", "src.u"):
        arena.lakehouse.catalog.drop_table(name)
        shutil.rmtree(arena.home / "warehouse" / "src" / name[4:])
    lineage = {row.step: row.checkpoint_id for row in arena.lineage("a")}
    wanted = set()
    for steps, checkpoints in ((first, abandoned), (second, lineage)):
        for step, rows in steps.items():
            if taken := [at for at in checkpoints if at >= step]:
                wanted |= {(row_id, checkpoints[min(taken)]) for row_id in rows}
    found = {
        row_id: who_has_seen(arena.lakehouse, [str(row_id)], table="src.t")["seen_by"] for row_id in range(0, 600, 67)
    }
    heirs = [lineage[4], lineage[8]]
    for row_id, readings in found.items():
        assert {each["checkpoint_id"] for each in readings} == {at for asked, at in wanted if asked == row_id}
        assert {each["checkpoint_id"]: each["survives"] for each in readings} == {
            at: at in lineage.values() for asked, at in wanted if asked == row_id
        }
        assert all((each["forks"] == ["b"]) == (each["checkpoint_id"] in heirs) for each in readings)
    assert any(not each["survives"] for readings in found.values() for each in readings)
    shown = json.loads(
        here("seen", str(first[1][0]), "--run", "b", "--table", "src.t", "--json", home=arena.home).stdout
    )
    assert [(each["run"], each["forks"], each["is_first"]) for each in shown["seen_by"]] == [("a", ["b"], True)]
    _check_scripts(arena, found)


def _check_scripts(arena: Arena, found: dict[int, list[dict[str, Any]]]) -> None:
    """Check that both scripts for a plain DuckDB find the same rows. Iceberg tables are read without the extension."""

    def parquet(scan: re.Match[str]) -> str:
        path = arena.home / f"{uuid4().hex}.parquet"
        pq.write_table(StaticTable.from_metadata(scan[1]).scan().to_arrow(), path)
        return f"read_parquet('{path}')"

    plain, iceberg = explain_sql(arena.lakehouse, "a"), explain_sql(arena.lakehouse, "a", iceberg=True)
    assert "INSTALL iceberg; LOAD iceberg;\n" in iceberg
    assert iceberg.count("FROM iceberg_scan('/") == 5
    assert "read_parquet" not in iceberg
    substituted = re.sub(r"iceberg_scan\('([^']+)'\)", parquet, iceberg.replace("INSTALL iceberg; LOAD iceberg;", ""))
    for script in (plain, substituted):
        with duckdb.connect() as connection:
            assert connection.execute(script).fetchall() == [(True,)]
            for row_id, rows in found.items():
                query = (
                    f"FROM seen_by((SELECT key FROM keys_of(['{row_id}']))) WHERE source_table = 'src.t' ORDER BY ALL"
                )
                assert sorted(map(str, rows_of(connection, query))) == sorted(map(str, rows))
