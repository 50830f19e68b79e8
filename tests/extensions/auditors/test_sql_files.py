"""`dlac sql` reads the lakehouse and nothing else, and writes no file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.cli.main import app
from dlac_pipeline.extensions.auditors.queries import check_reads_only, lock_to_lakehouse
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import DlacError, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import SourceSpec
from tests.conftest import source_rows


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lakehouse with a planned table in its warehouse, and one that is stored elsewhere."""
    made = tmp_path_factory.mktemp("sql") / "home é"  # in a folder without the files of other tests
    lakehouse = lakehouse_at(made)
    lakehouse.create_namespace("src")
    rows = source_rows(0, 20)
    for name, place in {"src.t": None, "src.apart": f"file://{made.parent}/apart"}.items():
        lakehouse.catalog.create_table(name, rows.schema, location=place)
        lakehouse.load(name).append(rows)
        make_plan(lakehouse, SourceSpec(table=name, columns=["x"]))
    (made / "secret.csv").write_text("a,b\n1,2\n")
    return made


def lakehouse_at(home: Path) -> Lakehouse:
    """The embedded lakehouse."""
    return connect(LakehouseConfig().at_home(home))


@pytest.fixture(scope="module")
def locked(home: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection that is locked as `dlac sql` locks a connection."""
    lakehouse = lakehouse_at(home)
    with open_audit(lakehouse) as connection:
        lock_to_lakehouse(connection, lakehouse)
        yield connection


def ask(home: Path, query: str, *options: str) -> None:
    """Run `dlac sql` in this process."""
    app(["sql", query, "--home", str(home), *options], standalone_mode=False)


def files_in(home: Path) -> dict[str, bytes]:
    """Content of all files but the catalog's."""
    paths = (path for path in home.parent.rglob("*") if path.is_file() and "catalog.db" not in path.name)
    return {str(path): path.read_bytes() for path in paths}


READS = [
    *("FROM read_csv('HOME/secret.csv')", "FROM read_text('HOME/catalog.db')"),
    *("FROM read_text('/proc/self/environ')", "FROM glob('/etc/*')"),
    *("FROM read_text('file://HOME/warehouse/../secret.csv')", "FROM read_csv('https://127.0.0.1:1/x.csv')"),
    *("SELECT getenv('HOME')", "FROM lakehouse", "ATTACH 'HOME/catalog.db' (TYPE sqlite)"),
    *("FROM sqlite_scan('HOME/catalog.db', 'iceberg_tables')", "INSTALL httpfs"),
    *("SET enable_external_access = true", "RESET allowed_directories"),
    *("SET lock_configuration = false; FROM read_text('/etc/passwd')", "PRAGMA enable_profiling = 'json'"),
    *("CREATE VIEW t AS FROM read_text('/etc/passwd'); FROM t", "CREATE SECRET s (TYPE s3)"),
    *("PRAGMA import_database('HOME')", "EXPLAIN ANALYZE LOAD httpfs", "SUMMARIZE FROM read_text('/etc/passwd')"),
]
WRITES = [
    "COPY (SELECT 1) TO 'TARGET'",
    "cOpY/**/(SELECT 1) TO 'TARGET'",
    "WITH x AS (COPY (SELECT 1) TO 'TARGET') FROM x",
    "SELECT 'é', \"é\" FROM plans; COPY (SELECT 1) TO 'TARGET'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO 'TARGET'",
    "PREPARE p AS COPY (SELECT 1) TO 'TARGET'; EXECUTE p",
    "FROM query('WITH x AS (COPY (SELECT 1) TO ''TARGET'') FROM x')",
    "FROM \"query\" ('WITH x AS (' || 'CO' || 'PY (SELECT 1) TO ''TARGET'') FROM x')",
    "EXPORT DATABASE 'TARGET'",
    "ATTACH 'TARGET'",
    "CALL enable_logging(storage = 'file', storage_path = 'TARGET')",
]
COMMANDED = ["FROM read_text('/etc/passwd')", "SELECT getenv('HOME')", "FROM lakehouse", "ATTACH 'TARGET'"]
"""One query of each way to be refused, for the command itself."""
QUESTIONS = [
    *("FROM checkpoints", "SELECT source_table FROM plans", "SUMMARIZE plans", "SHOW TABLES", "EXPLAIN FROM plans"),
    *("PIVOT plans ON source_table USING count(*)", "CREATE TEMP TABLE t AS FROM plans; FROM t"),
    'WITH x AS (SELECT 1 AS "copy") SELECT "copy", \'COPY\', query FROM x, (SELECT 1 AS query) -- COPY',
    "SELECT consumed('/x', 1, 'c')",
    "SELECT t.load, t.copy FROM (SELECT 1 AS load, 2 AS copy) t WHERE load = 1 ORDER BY load",
    "SELECT 1 AS copy, count(*) AS export, 3 AS import, 4 AS secret",
    *("CREATE TEMP TABLE load (load INT, copy INT); FROM load", "PRAGMA table_info('plans')"),
    "EXPLAIN ANALYZE SELECT 1 AS load",
]
HIDDEN = [
    "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '/tmp/none'",
    "EXPLAIN ANALYZE ATTACH '/tmp/none'",
    "WITH x AS MATERIALIZED (COPY plans TO '/tmp/none') FROM x",
    "WITH x AS (-- ,\rCOPY plans TO '/tmp/none') FROM x",
    "WITH x AS (/* /* */ , */COPY plans TO '/tmp/none') FROM x",
    "WITH x AS (((COPY plans TO '/tmp/none'))) FROM x",
    "SELECT load FROM t; COPY plans TO '/tmp/none'",
    *(f"WITH x AS({space}COPY plans TO '/tmp/none') FROM x" for space in "\u00a0\u2003\u200b\u2028\u3000\ufeff"),
]


REFUSED = (SpecInvalid, duckdb.Error)
"""What the command reports as the former."""


def test_sql_reads_nothing_else(home: Path, locked: duckdb.DuckDBPyConnection) -> None:
    """Files outside of the lakehouse, the environment, the network and variables of this process are out of reach."""
    assert [query for query in READS if is_answered(locked, query.replace("HOME", str(home)))] == []


def is_answered(locked: duckdb.DuckDBPyConnection, query: str) -> bool:
    """Return whether a query passes the check, and DuckDB answers it."""
    try:
        check_reads_only(locked, query)
        locked.execute(query).fetchall()
    except REFUSED:
        return False
    return True


@pytest.mark.parametrize("query", COMMANDED)
def test_command_reads_nothing_else(home: Path, query: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command checks the query and locks the connection."""
    with pytest.raises(SpecInvalid, match=r"--allow-files|DuckDB can answer"):
        ask(home, query.replace("HOME", str(home)).replace("TARGET", str(home / "new")))
    assert capsys.readouterr().out == ""
    assert not (home / "new").exists()


@pytest.mark.parametrize("target", ["warehouse/new", "new", "data file"])
def test_sql_writes_nothing(home: Path, locked: duckdb.DuckDBPyConnection, target: str) -> None:
    """Neither beside the lakehouse nor in it, nor over a data file that it may read."""
    before = files_in(home)
    path = next(name for name in before if "/data/" in name) if target == "data file" else str(home / target)
    for query in WRITES:
        assert not is_answered(locked, query.replace("TARGET", path)), query
        assert files_in(home) == before, query


def test_sql_answers_questions(locked: duckdb.DuckDBPyConnection) -> None:
    """Reading, and tables in memory, are no harm."""
    assert [query for query in QUESTIONS if not is_answered(locked, query)] == []


@pytest.mark.parametrize("query", ["FROM nowhere", "COPY plans TO 'x.csv'"])
def test_no_connection_outlives_an_error(home: Path, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a forked process may collect it as garbage, and DuckDB then waits for threads that it has not: it crashes."""
    opened: list[duckdb.DuckDBPyConnection] = []
    connect = duckdb.connect

    def record(*arguments: Any, **options: Any) -> duckdb.DuckDBPyConnection:
        opened.append(connect(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(duckdb, "connect", record)
    with pytest.raises(DlacError):
        ask(home, query)
    for connection in opened:
        with pytest.raises(duckdb.ConnectionException, match="closed"):
            connection.execute("SELECT 1")
    assert opened


@pytest.mark.parametrize("query", HIDDEN)
def test_hidden_write_is_refused(query: str) -> None:
    """Whatever is written before the COPY."""
    with duckdb.connect() as connection, pytest.raises((SpecInvalid, duckdb.Error)):
        check_reads_only(connection, query)


def test_sql_reads_data_files(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data files are read by a pattern and by their names in the audit's pages, also files outside of the warehouse."""
    lakehouse = lakehouse_at(home)
    tasks = [task for name in ("src.t", "src.apart") for task in lakehouse.load(name).scan().plan_files()]
    names = [task.file.file_path.removeprefix("file://") for task in tasks]
    for path in (*names, *(f"file://{name}" for name in names), f"{home}/warehouse/src/t/data/*.parquet"):
        ask(
            home,
            f"SELECT count(*) AS n, any_value(filename) AS f FROM read_parquet('{path}', filename = true)",
            "--json",
        )
        assert json.loads(capsys.readouterr().out)[0]["n"] == 20


@pytest.mark.slow
def test_database_opens_without_dlac(home: Path, tmp_path: Path) -> None:
    """Tables, views and macros are in the file; a file that exists is not replaced."""
    made = tmp_path / "out.duckdb"
    ask(home, "", "--database", str(made))
    with duckdb.connect(str(made), read_only=True) as connection:
        assert connection.sql("SELECT source_table FROM plans ORDER BY 1").fetchall() == [("src.apart",), ("src.t",)]
        assert connection.sql("SELECT * FROM problems").fetchall() == []
        assert connection.sql("SELECT * FROM checkpoints").fetchall() == []
    with pytest.raises(SpecInvalid, match=r"out\.duckdb"):
        ask(home, "", "--database", str(made))
    assert [path.name for path in tmp_path.iterdir()] == ["out.duckdb"]


def test_option_lets_files_through(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An auditor who asks for it reads and writes files."""
    ask(home, f"COPY (FROM read_csv('{home}/secret.csv')) TO '{tmp_path}/out.csv'", "--allow-files")
    assert (tmp_path / "out.csv").read_text() == "a,b\n1,2\n"
    assert capsys.readouterr().out
