"""The project's catalog: declared source tables, and saved queries."""

import tarfile
from pathlib import Path

import pytest
from pyiceberg.schema import Schema

from catalog import PROFILE
from catalog.tables import STDLIB, TABLES, TOKENS
from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.extensions.auditors.queries import check_reads_only, lock_to_lakehouse
from dlac_pipeline.lakehouse.iceberg.connect import connect
from examples.corpus import corpus, tokens
from examples.corpus.tokens import tokenize_corpus
from tests.fixtures import Command

_ROOT = Path(__file__).parents[2]
_QUERIES = sorted((_ROOT / "catalog" / "queries").glob("*.sql"))
assert _QUERIES


def columns_of(schema: Schema) -> list[tuple[int, str, str, bool]]:
    """The columns without their documentation."""
    return [(each.field_id, each.name, str(each.field_type), each.required) for each in schema.fields]


def test_declared_tables_are_created_once(tmp_path: Path) -> None:
    """Each table has its documentation. A second creation changes nothing."""
    lakehouse = connect(PROFILE.at_home(tmp_path))
    for declared in TABLES:
        declared.create(lakehouse)
        made = lakehouse.load(declared.name)
        assert made.properties["comment"] == declared.comment
        assert all(each.doc for each in made.schema().fields)
        declared.create(lakehouse)
        assert lakehouse.load(declared.name).metadata_location == made.metadata_location


def test_declared_tables_are_filled(tmp_path: Path) -> None:
    """The ingestion fills the declared tables: they have its columns, and the sizes of files that it asks for."""
    assert columns_of(STDLIB.schema) == columns_of(corpus.CORPUS)
    assert columns_of(TOKENS.schema) == columns_of(tokens.TOKENS)
    lakehouse = connect(PROFILE.at_home(tmp_path / "home"))
    (tmp_path / "lib").mkdir()
    for number in range(3):
        (tmp_path / "lib" / f"module_{number}.py").write_text(f"def double(x):\n    return {number} * x\n" * 20)
    STDLIB.create(lakehouse)
    corpus.ingest_stdlib_corpus(lakehouse, STDLIB.name, root=tmp_path / "lib")
    tokenize_corpus(lakehouse, tokenizer_path=tmp_path / "absent.json", tokens="sources.undeclared", appends=1)
    TOKENS.create(lakehouse)
    report = tokenize_corpus(lakehouse, tokens=TOKENS.name, tokenizer_path=tmp_path / "tokenizer.json", appends=1)
    assert lakehouse.load(TOKENS.name).scan().count() == report.sequences
    properties = lakehouse.load("sources.undeclared").properties
    assert {name: properties[name] for name in TOKENS.properties} == TOKENS.properties


@pytest.mark.slow
def test_saved_queries_answer(tmp_path: Path, here: Command) -> None:
    """Each only reads. An exact lakehouse has no problem, and a row for every other question. `dlac sql @FILE` runs one."""
    with tarfile.open(_ROOT / "tests" / "lakehouses" / "format-1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    home = tmp_path / "home"
    lakehouse = connect(PROFILE.at_home(home))
    with open_audit(lakehouse) as connection:
        lock_to_lakehouse(connection, lakehouse)
        for query in _QUERIES:
            check_reads_only(connection, query.read_text())
            assert (connection.execute(query.read_text()).fetchall() == []) == (query.stem == "problems"), query.stem
    problems = next(query for query in _QUERIES if query.stem == "problems")
    assert here("sql", f"@{problems}", "--json", home=home).stdout.strip() == "[]"
