"""Schemas of DLAC's own tables, compared with the kept ones of format version 1."""

import json
from pathlib import Path

from pyiceberg.types import IcebergType, ListType, MapType, StructType

from dlac_pipeline.lakehouse.ledger.schemas import FORMAT_VERSION, TABLES

KEPT = Path(__file__).parents[1] / "lakehouses" / f"schemas-{FORMAT_VERSION}.json"
WHAT_TO_DO = f"""the schemas differ from {KEPT.name}. Tables of users have those columns.
- A column, or a field of a struct, may be added as the last one, as an optional one. `Lakehouse.own` adds it to older tables,
  whose rows have a null in it: let the code and the SQL views read that. Then write the file again:
  python tests/unit/test_schemas.py
- A column that is renamed, removed, moved or of another type makes older tables unreadable. It needs a new FORMAT_VERSION,
  code that reads version {FORMAT_VERSION}, and an archive of it (tests/lakehouses/write.py)."""


def _text(kind: IcebergType) -> str:
    """Return a type as SQL writes it, without field ids, which each table gives itself."""
    if isinstance(kind, StructType):
        return f"struct<{', '.join(_columns(kind))}>"
    if isinstance(kind, ListType):
        return f"list<{_text(kind.element_type)}>"
    return f"map<{_text(kind.key_type)}, {_text(kind.value_type)}>" if isinstance(kind, MapType) else str(kind)


def _columns(kind: StructType) -> list[str]:
    return [f"{each.name} {_text(each.field_type)}{' not null' * each.required}" for each in kind.fields]


def _present() -> dict[str, object]:
    return {
        name: {"columns": _columns(schema.as_struct()), "partitions": [each.name for each in spec.fields]}
        for name, (schema, spec) in TABLES.items()
    }


def test_schemas_are_those_of_the_format() -> None:
    """No column of the format changes without a decision."""
    assert json.loads(KEPT.read_text()) == _present(), WHAT_TO_DO


if __name__ == "__main__":
    KEPT.write_text(json.dumps(_present(), indent=1) + "\n")
