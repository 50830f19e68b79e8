"""Delta tables for tests: commits and deletion vectors as the protocol defines them, and rows as DataFusion reads them."""

import json
import struct
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyroaring import BitMap64

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.sources import load_version
from dlac_pipeline.plan.plan import Plan
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.read.blocks import open_decoder
from dlac_pipeline.spec.job_spec import SourceSpec
from tests.legs import source_of

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_MAGIC = 1681511377
Rows = list[dict[str, Any]]


def log_file(location: Path, version: int) -> Path:
    """Return the path of a version's commit."""
    return location / "_delta_log" / f"{version:020}.json"


def actions_of(location: Path, version: int) -> list[dict[str, Any]]:
    """Return the actions of a version's commit."""
    return [json.loads(line) for line in log_file(location, version).read_text().splitlines()]


def newest(location: Path) -> int:
    """Return the newest version by the files of the log."""
    return max(int(path.stem) for path in (location / "_delta_log").glob("*.json"))


def live_adds(location: Path) -> dict[str, dict[str, Any]]:
    """Return the live `add` actions by their recorded path: a replay of the log's JSON files."""
    live: dict[str, dict[str, Any]] = {}
    for version in range(newest(location) + 1):
        actions = actions_of(location, version)
        for action in actions:
            if "remove" in action:
                live.pop(action["remove"]["path"], None)
        live |= {action["add"]["path"]: action["add"] for action in actions if "add" in action}
    return live


def commit(location: Path, actions: Iterable[Mapping[str, Any]]) -> None:
    """Write the next version."""
    lines = [json.dumps({"commitInfo": {"timestamp": 1, "operation": "MANUAL"}}), *map(json.dumps, actions)]
    log_file(location, newest(location) + 1).write_text("\n".join(lines) + "\n")


def change_first_action(location: Path, kind: str, **changes: Any) -> None:
    """Change fields of the `metaData` or the `protocol` action of version 0."""
    actions = actions_of(location, 0)
    for action in actions:
        if kind in action:
            action[kind] |= changes
    log_file(location, 0).write_text("\n".join(map(json.dumps, actions)) + "\n")


def set_dead_rows(location: Path, dead: Mapping[str, Sequence[int]], *, inline: bool = False) -> None:
    """Commit deletion vectors: all dead rows of some files (recorded path -> positions). No position removes the vector."""
    live, actions = live_adds(location), []
    for path, positions in dead.items():
        add = {name: value for name, value in live[path].items() if value is not None and name != "deletionVector"}
        kept = ("path", "partitionValues", "size", "deletionVector")
        removed = {name: live[path][name] for name in kept if live[path].get(name) is not None}
        actions.append({"remove": {**removed, "deletionTimestamp": 1, "dataChange": True}})
        vector = {"deletionVector": _vector(location, positions, inline=inline)} if positions else {}
        actions.append({"add": {**add, **vector, "dataChange": True}})
    commit(location, actions)


def query(location: Path, version: int) -> Rows:
    """Return the rows of a version as DataFusion reads them, in no order."""
    table = DeltaTable(str(location), version=version)
    found: Rows = pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all()).to_pylist()
    return found


def planned_rows(lakehouse: Lakehouse, location: Path, version: int | None = None, **settings: Any) -> Rows:
    """Return the live rows of a plan of a version, decoded with all their columns."""
    kind = settings.pop("format", "delta")
    columns = settings.pop("columns", None) or DeltaTable(str(location), version=version).schema().to_arrow().names
    source = SourceSpec(format=kind, table=str(location), version=version, columns=columns[:1], **settings)
    table = load_version(lakehouse, source.table, version)
    plan = make_plan(lakehouse, source)
    return [row for table_rows in _decoded(plan, source, columns, table) for row in table_rows.to_pylist()]


def _decoded(plan: Plan, source: SourceSpec, columns: Sequence[str], table: Any) -> Iterable[pa.Table]:
    leg = source_of(table=source.table, columns=tuple(columns), schema_id=plan.row.schema_id)
    decoder, units = open_decoder(table, leg, [plan.row.snapshot_id]), plan.units
    for unit in range(len(units)):
        path, rows = units.file_paths[int(units.file[unit])], int(units.rows[unit])
        yield decoder.row_group(path, int(units.row_group[unit]), rows).take(units.live_offsets(unit))


def _vector(location: Path, positions: Sequence[int], *, inline: bool) -> dict[str, Any]:
    blob = struct.pack("<I", _MAGIC) + BitMap64(positions).serialize()
    found = {"sizeInBytes": len(blob), "cardinality": len(set(positions))}
    if inline:
        return {**found, "storageType": "i", "pathOrInlineDv": _z85(blob + bytes(-len(blob) % 4))}
    name = uuid.uuid4()
    content = b"\x01" + struct.pack(">I", len(blob)) + blob + struct.pack(">I", zlib.crc32(blob))
    (location / f"deletion_vector_{name}.bin").write_bytes(content)
    return {**found, "storageType": "u", "pathOrInlineDv": _z85(name.bytes), "offset": 1}


def _z85(data: bytes) -> str:
    text = ""
    for (number,) in struct.iter_unpack(">I", data):
        text += "".join(_Z85[number // 85**place % 85] for place in range(4, -1, -1))
    return text
