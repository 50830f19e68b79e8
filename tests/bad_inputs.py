"""Bad inputs by kind: at least 400 that people type, paste or compute by mistake."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

FINISHED = "done"
"""The only run of the lakehouse of the inputs."""
SECRET = "hunter2"
_INF, _NAN = float("inf"), float("nan")
_HUGE = 10**30
_NUMBERS = {
    "order": "batch_size key_groups block_slices passes steps seed",
    "source": "passes weight",
    "read": "threads budget_mb",
    "checkpoint": "store_deadline_s local_keep every_steps every_s recovery_point_s mtbf_s keep_last keep_every_steps "
    "memory_every_steps",
    "launch": "world_size nproc_per_node gather_timeout_s last_call_s node_timeout_s verify_together_mb grace_s "
    "deadline_s hang_timeout_s start_timeout_s attempts_without_progress deaths_at_same_rows "
    "straggler_factor straggler_s straggler_steps",
    "cluster": "cpu gpu memory_mb time_limit_s port retries",
    "sequences": "length begin_id end_id pad_id",
}
_VALUES: dict[str, list[Any]] = {
    "run": ["", " ", "../x", "a/b", "a\nb", "-x", "a" * 101, "a b", 5, None, "\u202ex", ["a"]],
    "source.table": ["", "t", "src.", ".t", "src.nothing", "nothing.t", "src.t; drop table", 5, "src..t", " .t", None],
    "source.columns": [[], ["row_id", "row_id"], ["nope"], "x", [1], [""], ["ROW_ID"], None, {"x": 1}],
    "source.row_filter": [
        "   ",
        "\n",
        "nope > 1",
        "row_id >",
        "row_id > 'abc'",
        "row_id = true",
        "(",
        "(row_id > 1",
        "1",
        "drop table t",
        "row_id in ()",
        "name > 5 5",
        "row_id == == 1",
        5,
        "row_id > 1 AND",
        "even = 'yes'",
        "name = 1.5",
        "x = 1",
        "row_id between 'a' and 'b'",
        "NOT",
        "x.element > 1",
        "row_id > \x00 1",
    ],
    "source.exclude": [
        [""],
        [" "],
        ["\t"],
        ["nope = 1"],
        ["row_id >= 0"],
        "row_id > 3",
        [5],
        ["("],
        ["row_id < 5", ""],
    ],
    "source.identity_columns": [["nope"], [""], "row_id", [5], ["row_id", "nope"]],
    "source.nullable": [["nope"], [""], "row_id", [5]],
    "source.ragged": [["nope"], ["row_id"], [""], [5]],
    "source.transform": ["nope.py:f", "nope", "math:nope", ":", "nope_package.module:f", "math:pi", 5],
    "source.follow": ["x", 5, ""],
    "source.pin": ["x", ""],
    "source.on_reject": ["x", 5],
    "source.on_unreadable": ["x"],
    "source.on_overwrite": ["x"],
    "source.snapshot_id": [-5, 12345, "latest", 2**70, 1.5],
    "source.name": [5, ["a"]],
    "mixture": [5, [5], [{}], [{"table": "src.t"}]],
    "sequences.tokenizer": ["nope.json", "/", 5],
    "launch.preload": [[""], "x"],
    "checkpoint.memory": ["shm", "./shm", 5, None, "/dev/shm\0x"],
    "checkpoint.store": ["s3:/bucket", "nope://x", "s3://", "a\x00b", 5],
    "checkpoint.local": ["s3://bucket/x", "a\x00b", 5],
    "checkpoint.engine": ["x", ""],
    "checkpoint.mode": ["x", 5],
    "checkpoint.interval": ["x", 5],
    "checkpoint.keep_steps": [[-1], 5, ["x"], [1.5]],
    "checkpoint.store_properties": [5, {"a": {"b": 1}}],
    "launch.script": ["", "nope.py", "/", 5, "a\x00b"],
    "launch.args": [5, "x", [5]],
    "launch.nodes": ["0", "2:1", "x", "-1", "2:", 2, "2:4:6"],
    "launch.rendezvous": ["host", "host:99999", ":1", "host:port", "host:-1", 5],
    "launch.env": [{"A=B": "x"}, {"A": "\x00"}, {"": "x"}, {"A": 5}, 5],
    "launch.termination_url": ["ftp://x", "x", 5],
    "launch.on": ["x", 5],
    "launch.start": ["x"],
    "launch.new_leg": ["maybe", 5],
    "cluster.env": [{"A=B": "x"}, 5],
    "cluster.mounts": [5, [{}]],
    "lakehouse.type": ["x", 5],
    "lakehouse.uri": ["nope://x", "postgresql://host:port/db", "x", 5],
    "lakehouse.namespace": ["", " ", "a\x00b", 5],
    "lakehouse.warehouse": ["s3:/x", "nope://x", "a\x00b", 5],
    "lakehouse.properties": [5, {"a": {"b": 1}}],
    "lakehouse.password": [SECRET],
    "params": [5, {"a": {"b": 1}}],
    "nope": [1],
    "order.shuffle": ["maybe", 7],
    "order.nope": [1],
    "read.nope": [1],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BadInput:
    """One input: arguments of `dlac` or of `open_dataset`, and `files` to make in an empty working folder."""

    kind: str
    name: str
    arguments: list[str] = field(default_factory=list)
    dataset: dict[str, Any] | None = None
    spec: dict[str, Any] | None = None
    """The content of spec.yaml."""
    files: dict[str, bytes] = field(default_factory=dict)


def bad_inputs(script: str) -> list[BadInput]:
    """Return every bad input. `script` is an existing training script."""
    return [*_of_specs(script), *_of_spec_files(), *_of_commands(), *_of_datasets()]


def valid_spec(script: str) -> dict[str, Any]:
    """Return a job spec that `dlac plan` accepts."""
    return {
        "run": "bad",
        "source": {"table": "src.t", "columns": ["row_id", "x"]},
        "order": {"batch_size": 32, "key_groups": 8, "passes": 1},
        "launch": {"script": script},
    }


def _of_specs(script: str) -> Iterator[BadInput]:
    numbers = {
        f"{section}.{name}": [_INF, -_INF, _NAN, _HUGE, -1, "many", [1]]
        for section, names in _NUMBERS.items()
        for name in names.split()
    }
    for name, values in (numbers | _VALUES).items():
        for value in values:
            yield _of_spec(script, name, value)
    for section in ("source", "order", "launch"):
        spec = valid_spec(script)
        del spec[section]
        yield BadInput(kind="spec", name=f"without {section}", arguments=["plan", "spec.yaml"], spec=spec)


def _of_spec(script: str, name: str, value: Any) -> BadInput:
    spec = copy.deepcopy(valid_spec(script))
    *sections, last = name.split(".")
    place = spec
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    if name == "checkpoint.recovery_point_s":
        place["interval"] = "auto"
    command = "train" if name == "launch.script" else "plan"  # planning needs no script
    return BadInput(kind="spec", name=f"{name} = {value!r}", arguments=[command, "spec.yaml"], spec=spec)


def _of_spec_files() -> Iterator[BadInput]:
    contents = {
        "empty.toml": b"",
        "empty.yaml": b"",
        "binary.toml": bytes(range(256)),
        "binary.yaml": bytes(range(256)),
        "half.toml": b"[source\ntable=",
        "half.yaml": b"source: {table: [",
        "list.yaml": b"- a\n- b\n",
        "text.yaml": b"hello",
        "tagged.yaml": b"run: !!python/object/apply:os.system ['true']\n",
        "wide.toml": "run = 'a'\n".encode("utf-16"),
        "spec.txt": b"run = 'a'",
        "spec": b"run = 'a'",
        "twice.toml": b"run = 'a'\nrun = 'b'\n",
    }
    for name, content in contents.items():
        yield BadInput(kind="spec file", name=name, arguments=["plan", name], files={name: content})
    for name in ("missing.toml", ".", "", "a\nb.toml", "[/b].toml"):
        yield BadInput(kind="spec file", name=repr(name), arguments=["plan", name])


def _of_commands() -> Iterator[BadInput]:
    of_a_run: dict[str, list[str]] = {
        "status": [], "recover": [], "audit": [], "incidents": [], "checkpoints": [], "verify": [], "rehearse": [], "spike": [],
        "export": ["out.safetensors"], "rewind": ["--to-step", "10"], "fork": ["--as", "other"], "retire": [],
        "pins": [], "logs": [],
    }  # fmt: skip
    for command, rest in of_a_run.items():
        for run in ("nope", "../x", "", "a\nb", "[/b]", "-", "a" * 101):
            yield BadInput(kind="command", name=f"{command} {run!r}", arguments=[command, run, *rest])
    for arguments in _WRONG_ARGUMENTS:
        yield BadInput(kind="command", name=" ".join(map(repr, arguments)), arguments=arguments)


_WRONG_ARGUMENTS = [
    ["nope"],
    ["status", FINISHED, "--nope"],
    ["status", FINISHED, "--home", "/dev/null/x"],
    ["status", FINISHED, "--home", "missing"],
    ["status", FINISHED, "--spec", "missing.toml"],
    ["status"],
    ["train"],
    ["train", "missing.toml"],
    ["plan", "spec.yaml", "--home", ""],
    ["export", FINISHED, ""],
    ["export", FINISHED, "missing/folder/out.safetensors"],
    ["export", FINISHED, "/"],
    ["export", FINISHED, "out.safetensors", "--step", "99999"],
    ["export", FINISHED, "out.safetensors", "--step", "-1"],
    ["export", FINISHED, "out.safetensors", "--step", "x"],
    ["rewind", FINISHED, "--to-step", "99999"],
    ["rewind", FINISHED, "--to-step", "-1"],
    ["rewind", FINISHED, "--to-step", "1e3"],
    ["rewind", FINISHED, "--to-step", "10", "--exclude", ""],
    ["rewind", FINISHED, "--to-step", "10", "--exclude", "  "],
    ["rewind", FINISHED, "--to-step", "10", "--exclude", "nope = 1"],
    ["rewind", FINISHED],
    ["fork", FINISHED, "--as", ""],
    ["fork", FINISHED, "--as", FINISHED],
    ["fork", FINISHED, "--as", "../x"],
    ["fork", FINISHED, "--as", "a\nb"],
    ["fork", FINISHED],
    ["verify", FINISHED, "--step", "99999"],
    ["rehearse", FINISHED, "--step", "99999"],
    ["rehearse", FINISHED, "--steps", "0"],
    ["spike", FINISHED, "--step", "99999"],
    ["spike", FINISHED, "--step", "0"],
    ["spike", FINISHED, "--step", "3", "--text", "nope"],
    ["spike", FINISHED, "--top", "0"],
    ["seen"],
    ["seen", "1"],
    ["seen", "1", "2", "--table", "nope"],
    ["seen", "x", "--run", "nope"],
    ["seen", "", "--table", "src.t"],
    ["sql", ""],
    ["sql", "SELEC 1"],
    ["sql", "SELECT * FROM nope"],
    ["sql", "SELECT 1 +"],
    ["sql", "COPY (SELECT 1) TO 'out.csv'"],
    ["sql", "SELECT * FROM read_csv('/etc/passwd')"],
    ["sql", "SELECT * FROM read_text('/etc/passwd')"],
    ["sql", "ATTACH 'other.db'"],
    ["sql", "INSTALL httpfs"],
    ["sql", "LOAD httpfs"],
    ["sql", "SET enable_external_access = true"],
    ["sql", "EXPORT DATABASE 'out'"],
    ["sql", "SELECT * FROM glob('/*')"],
    ["sql", "CREATE TABLE x AS SELECT * FROM '/etc/passwd'"],
    ["unpin", "nodots"],
    ["unpin", ""],
    ["unpin", "src.t", "nope"],
    ["identify", "missing.safetensors"],
    ["identify", "."],
    ["identify", ""],
    ["name", FINISHED, ""],
    ["name", FINISHED, " "],
    ["name", FINISHED, "a\nb"],
    ["untag", FINISHED, "nope"],
    ["adopt", "spec.yaml", "missing"],
    ["adopt", "missing.toml", "."],
    ["adopt", "spec.yaml", "~nouser/x"],
    ["new-key", ""],
    ["new-key", "."],
    ["new-key", "/"],
    ["register", "points", "."],
    ["register", ".points", "."],
    ["register", "src.new", "~nouser/x"],
    ["init"],
    ["new-run", "second"],
    ["new-run", "second", "missing.toml"],
    ["new-run", ""],
    ["new-run", "a/b"],
    ["train", "~nouser/job.toml"],
    ["runs", "--home", "~nouser/x"],
    ["rendezvous", "host"],
    ["rendezvous", "host:99999"],
    ["rendezvous", "host:0x"],
    ["rendezvous", ""],
    ["logs", FINISHED, "--rank", "-1"],
    ["logs", FINISHED, "--rank", "99"],
    ["upkeep", "--home", "missing"],
    ["audit", FINISHED, "--json", "--nope"],
    ["incidents", FINISHED, "--limit", "x"],
]


def _of_datasets() -> Iterator[BadInput]:
    valid: dict[str, Any] = {"table": "src.t", "columns": ["row_id"], "batch_size": 32}
    for name, values in _DATASET_VALUES.items():
        for value in values:
            yield BadInput(kind="dataset", name=f"{name} = {value!r}", dataset={**valid, name: value})
    for missing in valid:
        settings = {name: value for name, value in valid.items() if name != missing}
        yield BadInput(kind="dataset", name=f"without {missing}", dataset=settings)


_DATASET_VALUES: dict[str, list[Any]] = {
    "table": [None, "", 5, "nope", "src.nope", ["src.t"]],
    "columns": [None, "row_id", [], [5], ["nope"], {"row_id": 1}],
    "batch_size": [0, -1, "many", 1.5, None, 7, _HUGE, _INF, True],
    "rank": [-1, 5, "0", 1.5],
    "world_size": [0, -1, 5, "2", 1.5],
    "home": [5, ["x"], "a\x00b"],
    "state": [{}, {"leg": 1}, {"format_version": 1}, "missing", 5, [1], {"leg": {}, "step": 10**9}, ""],
    "lakehouse": ["x", 5, {"uri": "x"}],
    "spec": ["missing.toml", 5, "", {"run": "x"}],
    "row_filter": ["(", " ", 5, "nope > 1"],
    "exclude": [[""], "row_id > 1", 5, [" "], ["row_id >= 0"]],
    "shuffle": ["maybe", 5],
    "length": [-1, "long", _INF],
    "threads": [0, -1, _INF],
    "budget_mb": [0, -1, _INF],
    "passes": [0, -1, "x"],
    "nope": [1],
}
