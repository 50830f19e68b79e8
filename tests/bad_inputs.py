"""Bad inputs by kind: at least 800 that people type, paste or compute by mistake."""

import copy
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import BaseModel

from dlac_pipeline.spec.job_spec import full_spec
from dlac_pipeline.spec.spec_problems import bounds_of
from tests.bad_files import FINISHED, LOOP, BadInput, Made, bad_files
from tests.small_records import raw_spec

SECRET = "hunter2"
_INF, _NAN = float("inf"), float("nan")
_HUGE = 10**30
_VALUES: dict[str, list[Any]] = {
    "run": ["", " ", "../x", "a/b", "a\nb", "-x", "a" * 101, "a b", 5, None, "\u202ex", ["a"]],
    "source.table": ["", "t", "src.", ".t", "src.nothing", "nothing.t", "src.t; drop table", 5, "src..t", " .t", None],
    "source.columns": [[], ["row_id", "row_id"], ["nope"], "x", [1], [""], ["ROW_ID"], None, {"x": 1}],
    "source.row_filter": ["   ", "nope > 1", "row_id >", "row_id > 'abc'", "(", "row_id in ()", "x.element > 1", 5],
    "source.exclude": [[" "], ["nope = 1"], ["row_id >= 0"], ["("], ["row_id < 5", ""]],
    "source.identity_columns": [["nope"], [""], "row_id", [5], ["row_id", "nope"]],
    "source.nullable": [["nope"], [""], "row_id", [5]],
    "source.transform": ["nope.py:f", "nope", "math:nope", ":", "nope_package.module:f", "math:pi", 5],
    "source.version": [-5, 12345, "latest", 2**70, 1.5],
    "checkpoint.memory": ["shm", "./shm", 5, None, "/dev/shm\0x"],
    "checkpoint.store": ["s3:/bucket", "nope://x", "s3://", "a\x00b", 5],
    "launch.script": ["", "nope.py", "/", 5, "a\x00b"],
    "launch.nodes": ["0", "2:1", "x", "-1", "2:", 2, "2:4:6"],
    "launch.rendezvous": ["host", "host:99999", ":1", "host:port", "host:-1", 5],
    "launch.env": [{"A=B": "x"}, {"A": "\x00"}, {"": "x"}, {"A": 5}, 5],
    "lakehouse.uri": ["nope://x", "postgresql://host:port/db", "x", 5],
    "lakehouse.namespace": ["", " ", "a\x00b", 5],
    "lakehouse.password": [SECRET],
}


def bad_inputs(script: str, made: Made) -> list[BadInput]:
    """Return every bad input. `script` is an existing training script."""
    values = (_of_specs(script), _of_commands(), _of_options(script), _of_datasets())
    return [*chain.from_iterable(values), *bad_files(valid_spec(script), made)]


def valid_spec(script: str) -> dict[str, Any]:
    """Return a job spec that `dlac plan` accepts."""
    order = {"key_groups": 8, "passes": 1}
    return {**raw_spec(source={"columns": ["row_id", "x"]}, order=order, launch={"script": script}), "run": "bad"}


def _of_specs(script: str) -> Iterator[BadInput]:
    for name, values in _VALUES.items():
        for value in values:
            yield _of_spec(script, name, value)
    for name, value in _of_model(full_spec()):
        yield replace(_of_spec(script, name, value), kind="setting", is_parsed=True)
    for section in ("source", "order", "launch"):
        spec = valid_spec(script)
        del spec[section]
        yield BadInput(kind="spec", name=f"without {section}", arguments=["plan", "spec.yaml"], spec=spec)


def _of_model(model: type[BaseModel], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting of a section with values of other types, beyond its bounds, and with NUL."""
    for name, field in model.model_fields.items():
        union = typing.get_origin(field.annotation) in (typing.Union, UnionType)
        kinds = typing.get_args(field.annotation) if union else (field.annotation,)
        kind = kinds[0] if typing.get_origin(kinds[0]) is not Annotated and str not in kinds[1:] else int | str
        values = _wrong_values(kind, bounds_of(field))
        is_data = name in ("row_filter", "exclude", "params")  # NUL may be part of a text to compare
        yield from ((f"{place}{name}", value) for value in values if not (is_data and r"\x00" in repr(value)))
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _of_model(kind, f"{place}{name}.")


def _wrong_values(kind: Any, bounds: Mapping[type, float]) -> list[Any]:
    """Return values that no setting of a type takes."""
    origin = typing.get_origin(kind) or kind
    if origin is UnionType:
        return [_INF, _HUGE, [1], True, {"x": 1}, 1.5, "a\0b"]
    if origin is Literal:
        return ["nope", 5, ["x"], {"x": "x"}, *([""] if "" not in typing.get_args(kind) else [])]
    if origin in (int, float):
        below = [bound - 1 for bound_kind, bound in bounds.items() if bound_kind in (Ge, Gt)]
        return [_INF, _NAN, _HUGE, "many", [1], True, {"x": 1}, *below, *([1.5] if origin is int else [])]
    if origin is list:
        return ["x", 5, {"x": 1}, [None], ["a\0b"], [{}], [1.5]]
    if origin is dict:
        return ["x", 5, ["x"], {"a": {"b": {"c\0": 1}}}, {"a\0b": "x"}, {"a": "b\0"}]
    return {bool: ["maybe", 7, ["x"], "", "a\0b"], str: [5, ["x"], {"x": 1}, True, "a\0b"]}.get(
        origin, ["x", 5, ["x"], {"nope": 1}]
    )


def _of_spec(script: str, name: str, value: Any) -> BadInput:
    spec = copy.deepcopy(valid_spec(script))
    *sections, last = name.split(".")
    place = spec
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    command = "train" if name == "launch.script" else "plan"  # planning needs no script
    return BadInput(kind="spec", name=f"{name} = {value!r}", arguments=[command, "spec.yaml"], spec=spec)


def _of_commands() -> Iterator[BadInput]:
    of_a_run: dict[str, list[str]] = {
        "checkpoint export": ["out.safetensors"],
        "rewind": ["--to-step", "10"],
        "fork": ["--as", "other"],
    }
    for command in ("status", "recover", "audit", "incidents", "rehearse", "spike", "table pins", "logs"):
        of_a_run[command] = []
    for command in ("list", "verify", "retire"):
        of_a_run[f"checkpoint {command}"] = []
    for command, rest in of_a_run.items():
        for run in ("nope", "../x", "", "a\nb", "[/b]", "-"):
            yield BadInput(kind="command", name=f"{command} {run!r}", arguments=[*command.split(), run, *rest])
    for arguments in _WRONG_ARGUMENTS:
        yield BadInput(kind="command", name=" ".join(map(repr, arguments)), arguments=arguments)


_STEPS = ("x", "", "-1", "99999999999999999999", "3")
_OPTIONS: dict[tuple[str, ...], dict[str, Sequence[str]]] = {
    ("spike", FINISHED): {"--step": _STEPS[:-1]},
    ("rows", FINISHED, "--step", "1"): {"--rank": _STEPS[:-1], "--text": ("nope", "a.b")},
    ("checkpoint", "export", FINISHED, "out", "--spec", "spec.yaml"): {
        "--step": _STEPS,
        "--part": ("nope", "../model"),
        "--config": ("missing", "loop", "~nouser/x"),
    },
    ("fork", FINISHED, "--as", "other", "--spec", "spec.yaml"): {"--step": _STEPS, "--checkpoint": ("nope",)},
    ("rewind", FINISHED): {"--to-step": _STEPS, "--checkpoint": ("nope",)},
    ("rewind", FINISHED, "--to-step", "5"): {"--exclude": ("", "\t", "(", "nope = 1"), "--source": ("nope",)},
    ("ledger", "rebuild", "--dry-run"): {"--journal": ("missing", "loop", "nope://x", "s3://", "spec.yaml")},
    ("train", "spec.yaml"): {
        "--nodes": ("0", "2:1", "many"),
        "--rendezvous": ("host", "host:0", ":5"),
        "--rdzv-conf": ("x", "x=1", "timeout=x"),
    },
    ("chaos", "spec.yaml"): {
        "--kill": ("rank", "nope@step=1", "rank@", "rank@step=0", "node:1@step=1", "rank@-1s"),
        "--every": ("0s", "-1s", "x", "nan", "2d", "1e999s"),
    },
    ("chaos", "spec.yaml", "--kill", "rank@step=5"): {"--cascade": ("x", "0"), "--away": ("x", "0s")},
    ("init", "src.t"): {"--columns": ("nope", "x,", ",", "x,x"), "--catalog": ("nope",)},
    ("forget", "rows", "src.t"): {"--where": ("", "(", "nope = 1", "row_id = 'x'", "row_id = 99999999")},
}
"""Arguments that are right, and the wrong values of further options."""


def _of_options(script: str) -> Iterator[BadInput]:
    for arguments, options in _OPTIONS.items():
        spec = valid_spec(script) | {"run": FINISHED if arguments[0] == "checkpoint" else "optional"}
        for named in ([*arguments, option, value] for option, values in options.items() for value in values):
            yield BadInput(kind="option", name=" ".join(map(repr, named)), arguments=named, spec=spec, links=LOOP)


_WRONG_ARGUMENTS = [
    *(["nope"], ["status", FINISHED, "--home", "/dev/null/x"], ["rewind", FINISHED, "--to-step", "99999"]),
    *(["fork", FINISHED, "--as", FINISHED], ["sql", "SELECT * FROM nope"]),
    *(["sql", "CREATE TABLE x AS SELECT * FROM '/etc/passwd'"], ["checkpoint", "identify", "missing.safetensors"]),
    *(["checkpoint", "adopt", "spec.yaml", "missing"], ["logs", FINISHED, "--rank", "99"]),
]


def _of_datasets() -> Iterator[BadInput]:
    valid: dict[str, Any] = {"table": "src.t", "columns": ["row_id"], "batch_size": 32}
    for name, values in _DATASET_VALUES.items():
        for value in values:
            yield BadInput(kind="dataset", name=f"{name} = {value!r}", dataset={**valid, name: value})


_DATASET_VALUES: dict[str, list[Any]] = {
    "table": [None, "", 5, "nope", "src.nope", ["src.t"]],
    "columns": [None, "row_id", [], [5], ["nope"], {"row_id": 1}],
    "batch_size": [0, -1, "many", 1.5, None, 7, _HUGE, _INF, True],
    "world_size": [0, -1, 5, "2", 1.5],
    "state": [{}, {"leg": 1}, {"format_version": 1}, "missing", 5, [1], {"leg": {}, "step": 10**9}, ""],
    "spec": ["missing.toml", 5, "", {"run": "x"}],
    "exclude": [[""], "row_id > 1", 5, [" "], ["row_id >= 0"]],
    "nope": [1],
}
