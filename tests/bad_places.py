"""Bad variables, tables and places to write to, by kind. `tests/bad_inputs.py` has the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.bad_files import FINISHED, LOOP, PLAN, TRAIN, BadInput, Made, damaged

_TORCHRUN = {
    "NNODES": ["0", "many", "3:2", "1:"],
    "NPROC_PER_NODE": ["0", "-1", "many", "1.5", ""],
    "RDZV_CONF": ["nope=1", "timeout=many", "timeout", "=", "last_call_timeout=-1"],
    "RDZV_ENDPOINT": ["host:port", "host:99999", ":"],
    "MASTER_PORT": ["many", "0"],
}


def bad_places(spec: Mapping[str, Any], made: Made) -> Iterator[BadInput]:
    """Yield bad inputs of variables, tables and places. `spec` is a valid job spec."""
    for part in (_variables, _ignored_variables, _registered, _places):
        yield from part(dict(spec), made)


def _variables(spec: dict[str, Any], _: Made) -> Iterator[BadInput]:
    def variable(name: str, value: str, arguments: list[str], **facts: Any) -> BadInput:
        facts["environment"] = {**facts.get("environment", {}), name: value}
        return BadInput(kind="variable", name=f"{name}={value!r}", arguments=arguments, **facts)

    train = {**spec, "run": "varied", "launch": {**spec["launch"], "script": "missing.py"}}
    for name, values in _TORCHRUN.items():
        others = {"PET_MASTER_ADDR": "host"} if name == "MASTER_PORT" else {}
        yield from (variable(f"PET_{name}", value, TRAIN, spec=train, environment=others) for value in values)
    for home in (" ", "a\nb", "s3://x", "~nouser/x", "loop", "file", "/dev/null", "x" * 300, "missing"):
        yield variable("DLAC_HOME", home, ["runs"], links=LOOP, files={"file": b""})
    launch = {**spec["launch"], "nodes": "2", "rendezvous": "localhost:29555"}
    for key in ("", "short", " " * 20, "\t"):
        yield variable("DLAC_RENDEZVOUS_KEY", key, TRAIN, spec={**spec, "run": "keyed", "launch": launch})


def _ignored_variables(spec: dict[str, Any], _: Made) -> Iterator[BadInput]:
    def warned(name: str, arguments: list[str], spec: dict[str, Any], warns_of: str = "", **more: str) -> BadInput:
        facts: dict[str, Any] = {"environment": {**more, name: "1"}, "warns_of": warns_of or f"{name!r}"}
        return BadInput(kind="variable", name=name, arguments=arguments, spec=spec, **facts)

    train = {**spec, "run": "varied", "launch": {**spec["launch"], "script": "missing.py"}}
    for name in ("PET_NPROC_PER_NODES", "PET_NODES", "PET_RDZV_ENDPONT", "PET_nnodes", "PET_"):
        yield warned(name, TRAIN, train)
    for name in ("DLAC_HOEM", "DLACHOME", "dlac_home"):
        yield warned(name, PLAN, spec, name, DLAC_HOME="")
    for name in ("CATALGO__P__URI", "CATALOG_P__URI", "URI", "MAX_WORKER", "HOEM"):
        yield warned(f"PYICEBERG_{name}", PLAN, spec)


def _registered(_: dict[str, Any], made: Made) -> Iterator[BadInput]:
    def registered(name: str, table: str, place: str, **files: bytes) -> BadInput:
        files = {f"data/{file}.parquet": content for file, content in files.items()}
        arguments = ["table", "register", table, place]
        others = {"empty/x": b"", "data/b.txt": b"x"}
        return BadInput(kind="Parquet", name=name, arguments=arguments, files=files or others, links=LOOP)

    for name, content in damaged(made.parquet[-300:]).items():
        yield registered(name, "new.files", "data", a=content)
    for name in ("points", "", "a.", ".a", "a..b", " . ", "a.b\n", "a.\x1b[2J"):
        yield registered(f"table {name!r}", name, "data", a=made.parquet)
    for place in (
        "",
        " ",
        "missing",
        "nope://x",
        "s3://",
        "s3:/x/y",
        "loop",
        "~nouser/x",
        "x" * 300,
        "[",
        "data/*.csv",
        "empty",
        "/dev/null",
    ):
        yield registered(f"at {place!r}", "new.files", place)


def _places(spec: dict[str, Any], made: Made) -> Iterator[BadInput]:
    """Yield folders and files that commands write to."""
    finished, files = {**spec, "run": FINISHED}, {"file": b"", "file.pub.pem": b""}
    of_run = [FINISHED, "--spec", "spec.yaml"]
    commands = [
        ["forget", "new-key"],
        ["init", "src.t", "--into"],
        ["checkpoint", "export-state", *of_run],
        ["spike", *of_run, "--step", "3", "--sandbox"],
        ["rehearse", *of_run, "--sandbox"],
    ]
    for place in ("/dev/null/x", "loop", "loop/x", "~nouser/x", "x" * 300, "file", "file/x"):
        common: dict[str, Any] = {"kind": "place", "links": LOOP, "files": files}
        for name in ("store", "local"):
            changed = {**spec, "run": "placed", "checkpoint": {name: place, "memory": ""}}
            yield BadInput(name=f"checkpoint.{name} = {place!r}", arguments=TRAIN, spec=changed, **common)
        for command in commands:
            yield BadInput(name=f"{command[0]} {place!r}", arguments=[*command, place], spec=finished, **common)
