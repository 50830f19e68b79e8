"""Bad variables, catalogs, tables and places to write to, by kind. `tests/bad_inputs.py` has the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.bad_files import FINISHED, BadInput, Made, damaged


def bad_places(spec: Mapping[str, Any], made: Made) -> Iterator[BadInput]:
    """Yield bad inputs of variables, catalogs, tables and places. `spec` is a valid job spec."""
    for part in (_variables, _catalogs, _registered, _places):
        yield from part(dict(spec), made)


def _variables(spec: dict[str, Any], _: Made) -> Iterator[BadInput]:
    train = {**spec, "run": "varied", "launch": {**spec["launch"], "script": "missing.py"}}
    wrong = {
        "NNODES": ["0", "many", "-1", "3:2", "1:"],
        "NPROC_PER_NODE": ["0", "-1", "many", "1.5", ""],
        "MAX_RESTARTS": ["-1", "many", "1.5"],
        "START_METHOD": ["nope", ""],
        "SHUTDOWN_TIMEOUT": ["-1", "many", "99999"],
        "RDZV_CONF": ["nope=1", "timeout=many", "timeout", "=", "last_call_timeout=-1"],
        "RDZV_ENDPOINT": ["host:port", "host:99999", ":"],
        "RDZV_ID": ["another"],
        "NUMA_BINDING": ["nope"],
        "STANDALONE": ["maybe"],
        "LOG_DIR": ["logs"],
        "MONITOR_INTERVAL": ["many"],
        "TEE": ["3"],
        "REDIRECTS": ["3"],
        "MODULE": ["1"],
        "NO_PYTHON": ["1"],
        "RUN_PATH": ["1"],
        "LOCAL_ADDR": ["host"],
        "MASTER_ADDR": [" "],
        "MASTER_PORT": ["many", "0"],
    }
    for name, values in wrong.items():
        for value in values:
            environment = {f"PET_{name}": value} | ({"PET_MASTER_ADDR": "host"} if name == "MASTER_PORT" else {})
            yield BadInput(
                kind="variable",
                name=f"PET_{name}={value}",
                arguments=["train", "spec.yaml"],
                spec=train,
                environment=environment,
            )
    for name in (
        "PET_NPROC_PER_NODES",
        "PET_NODES",
        "PET_MAX_RESTART",
        "PET_RDZV_ENDPONT",
        "PET_SCRIPT",
        "PET_nnodes",
        "PET_",
    ):
        yield BadInput(
            kind="variable",
            name=name,
            arguments=["train", "spec.yaml"],
            spec=train,
            environment={name: "1"},
            warns_of=f"{name!r}",
        )
    for name in ("DLAC_HOEM", "DLAC_HOMES", "DLACHOME", "dlac_home"):
        yield BadInput(
            kind="variable",
            name=name,
            arguments=["plan", "spec.yaml"],
            spec=spec,
            environment={"DLAC_HOME": "", name: "x"},
            warns_of=name,
        )
    for home in (" ", "a\nb", "s3://x", "gs:/x", "~nouser/x", "loop", "file", "/dev/null", "x" * 300, "missing"):
        environment = {"DLAC_HOME": home}
        yield BadInput(
            kind="variable",
            name=f"DLAC_HOME={home!r}",
            arguments=["runs"],
            environment=environment,
            links={"loop": "loop"},
            files={"file": b""},
        )
    for key in ("", "short", " " * 20, "\t"):
        launch = {**spec["launch"], "nodes": "2", "rendezvous": "localhost:29555"}
        named = {**spec, "run": "keyed", "launch": launch}
        yield BadInput(
            kind="variable",
            name=f"DLAC_RENDEZVOUS_KEY={key!r}",
            arguments=["train", "spec.yaml"],
            spec=named,
            environment={"DLAC_RENDEZVOUS_KEY": key},
        )
    for name in (
        "PYICEBERG_CATALGO__P__URI",
        "PYICEBERG_CATALOG_P__URI",
        "PYICEBERG_URI",
        "PYICEBERG_MAX_WORKER",
        "PYICEBERG_HOEM",
        "PYICEBERG__URI",
    ):
        yield BadInput(
            kind="variable",
            name=name,
            arguments=["plan", "spec.yaml"],
            spec=spec,
            environment={name: "1"},
            warns_of=f"{name!r}",
        )
    for name in (
        "PYICEBERG_MAX_WORKERS",
        "PYICEBERG_LEGACY_CURRENT_SNAPSHOT_ID",
        "PYICEBERG_MANIFEST_CACHE_SIZE",
        "PYICEBERG_DOWNCAST_NS_TIMESTAMP_TO_US_ON_WRITE",
    ):
        for value in ("many", "-1", "1.5", ""):
            yield BadInput(kind="variable", name=f"{name}={value}", arguments=["runs"], environment={name: value})


def _catalogs(spec: dict[str, Any], _: Made) -> Iterator[BadInput]:
    named = {**spec, "lakehouse": {"name": "p"}}
    uri, warehouse = (
        {"PYICEBERG_CATALOG__P__URI": "sqlite:///c.db"},
        {"PYICEBERG_CATALOG__P__WAREHOUSE": "file:///tmp/nope-dlac"},
    )
    for wrong in (
        {"PYICEBERG_CATALOG": "p"},
        {"PYICEBERG_CATALOG__P": "x"},
        {"PYICEBERG_CATALOG__P__URI": "nope://x"},
        {"PYICEBERG_CATALOG__P__TYPE": "nope"},
        {**uri, "PYICEBERG_CATALOG__P__WAREHOSE": "x"},
        {**uri, **warehouse, "PYICEBERG_CATALOG__P__S3__ENDPONT": "x"},
        {"PYICEBERG_CATALOG__Q__URI": "x"},
        {**warehouse, "PYICEBERG_CATALOG__P__URL": "sqlite:///c.db"},
        {**uri, **warehouse, "PYICEBERG_CATALOG__P__TYP": "rest"},
        {**uri, **warehouse, "PYICEBERG_CATALOG__P__S3__ACCESS_KEY": "x"},
        {**uri, "PYICEBERG_CATALOG__P__WAREHOUSE": "nope://x"},
        {"PYICEBERG_CATALOG__P__TYPE": "in-memory"},
        {"PYICEBERG_CATALOG__P__TYPE": "sql"},
        {"PYICEBERG_HOME": "missing"},
        {"PYICEBERG_CATALOG__P__": "x"},
        {"PYICEBERG_CATALOG__P__PY_CATALOG_IMPL": "nope.Class"},
        {"PYICEBERG_CATALOG__P__PY_CATALOG_IMPL": "math"},
        {**uri, **warehouse, "PYICEBERG_CATALOG__P__PY_IO_IMPL": "nope.Class"},
    ):
        yield BadInput(
            kind="catalog", name=f"{wrong!r}", arguments=["plan", "spec.yaml"], spec=named, environment=wrong
        )
    for name, content in damaged(b"catalog:\n  p:\n    uri: sqlite:///c.db\n").items():
        yield BadInput(
            kind="catalog",
            name=f"file: {name}",
            arguments=["plan", "spec.yaml"],
            spec=named,
            environment={"PYICEBERG_HOME": "."},
            files={".pyiceberg.yaml": content},
        )
    for section, setting in (("lakehouse", "properties"), ("checkpoint", "store_properties")):
        for misspelled in (
            "s3.endpont",
            "s3.acces-key-id",
            "s3.access-key",
            "gcs.project",
            "adls.account-nam",
            "warehose",
            "S3.ENDPOINT",
            "s3_endpoint",
        ):
            changed = {**spec, section: {setting: {misspelled: "x"}}}
            name = f"{section}.{misspelled}"
            yield BadInput(kind="catalog", name=name, arguments=["train", "spec.yaml"], spec=changed)


def _registered(_: dict[str, Any], made: Made) -> Iterator[BadInput]:
    for name, content in damaged(made.parquet[-300:]).items():
        yield BadInput(
            kind="Parquet",
            name=name,
            arguments=["table", "register", "new.files", "data"],
            files={"data/a.parquet": content},
        )
    for name in ("points", "", ".", "a.", ".a", "a..b", " . ", "a.b\n", "a.\x1b[2J"):
        arguments = ["table", "register", name, "data"]
        yield BadInput(
            kind="Parquet", name=f"table {name!r}", arguments=arguments, files={"data/a.parquet": made.parquet}
        )
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
        "data/b.txt",
    ):
        files = {"empty/x": b"", "data/b.txt": b"x"}
        yield BadInput(
            kind="Parquet",
            name=f"at {place!r}",
            arguments=["table", "register", "new.files", place],
            files=files,
            links={"loop": "loop"},
        )


def _places(spec: dict[str, Any], made: Made) -> Iterator[BadInput]:
    """Yield folders and files that commands write to."""
    for place in ("/dev/null/x", "loop", "loop/x", "~nouser/x", "x" * 300, "file", "file/x"):
        for section, name in (("checkpoint", "store"), ("checkpoint", "local")):
            changed = {**spec, "run": "placed", section: {name: place, "memory": ""}}
            yield BadInput(
                kind="place",
                name=f"{section}.{name} = {place!r}",
                arguments=["train", "spec.yaml"],
                spec=changed,
                links={"loop": "loop"},
                files={"file": b""},
            )
        for command in (
            ["forget", "new-key"],
            ["init", "src.t", "--into"],
            ["checkpoint", "export-state", FINISHED, "--spec", "spec.yaml"],
        ):
            yield BadInput(
                kind="place",
                name=f"{command[0]} {place!r}",
                arguments=[*command, place],
                spec={**spec, "run": FINISHED},
                links={"loop": "loop"},
                files={"file": b"", "file.pub.pem": b""},
            )
        for command in (
            ["spike", FINISHED, "--step", "3", "--spec", "spec.yaml"],
            ["rehearse", FINISHED, "--spec", "spec.yaml"],
        ):
            yield BadInput(
                kind="place",
                name=f"{command[0]} --sandbox {place!r}",
                arguments=[*command, "--sandbox", place],
                spec={**spec, "run": FINISHED},
                links={"loop": "loop"},
                files={"file": b""},
            )
