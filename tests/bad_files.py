"""Bad files, variables, tables and places to write to, by kind. `tests/bad_inputs.py` has bad values."""

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from dlac_pipeline.extensions.erasure.passport import digest_of_passport

FINISHED = "done"
"""A finished run of the lakehouse of the inputs, started by a script as with torchrun."""
LAUNCHED = "launched"
"""A run of that lakehouse that DLAC launched, and that has no checkpoint."""
LOOP = {"loop": "loop"}
"""A link to itself."""
TRAIN = ["train", "spec.yaml"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadInput:
    """One input: arguments of `dlac` or of `open_dataset`, and what to make in an empty working folder."""

    kind: str
    name: str
    arguments: list[str] = field(default_factory=list)
    dataset: dict[str, Any] | None = None
    spec: dict[str, Any] | None = None
    """The content of spec.yaml."""
    is_parsed: bool = False
    """Read the spec only, as all commands do first."""
    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    recorded: bytes | None = None
    """Content of the spec.json of the launched run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Content of intact files, which inputs damage."""

    weights: bytes = b"w" * 64
    passport: bytes = b"{}\nfilter"
    key: bytes = b""
    public_key: bytes = b""
    spec: bytes = b"{}"
    parquet: bytes = b"PAR1" * 16


def damaged(content: bytes) -> dict[str, bytes]:
    """Return other contents in place of a file's contents, by their names."""
    half = len(content) // 2
    flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :] if content else b"x"
    texts = {"text": b"hello", "null": b"null", "list": b"[]", "object": b"{}", "long number": b"9" * 5000}
    others = {"zeros": bytes(64), "bytes": bytes(range(256)), "deep": b"[" * 100_000, "a changed bit": flipped}
    return {"nothing": b"", "half": content[:half], **texts, **others}


def bad_files(spec: Mapping[str, Any], made: Made) -> Iterator[BadInput]:
    """Yield bad inputs of files, variables, tables and places. `spec` is a valid job spec."""
    found = [part(dict(spec), made) for part in (_passports, _certificates, _recorded_specs, _adopted)]
    found += [part(dict(spec), made) for part in (_shadows, _job_files, _variables, _registered, _places)]
    yield from chain.from_iterable(found)


def _passports(_: dict[str, Any], made: Made) -> Iterator[BadInput]:
    asked = ["passport", "check", "w.safetensors", "5"]

    def with_passport(name: str, passport: bytes, home: str = "") -> BadInput:
        files = {"w.safetensors": made.weights, "w.safetensors.passport": passport}
        environment = {"DLAC_HOME": home} if home else {}
        return BadInput(kind="passport", name=name, arguments=asked, files=files, environment=environment)

    yield BadInput(kind="passport", name="none", arguments=asked, files={"w.safetensors": made.weights})
    for name, content in damaged(made.passport).items():
        yield with_passport(name, content)
    for name, facts in _changed(made.passport.partition(b"\n")[0]):
        content = made.passport.partition(b"\n")[2]
        facts.pop("digest", None)
        digest = digest_of_passport(facts, content) if "digest" not in name else "x"
        # only the ledger can refute another text
        home = "" if name.endswith("'nope'") else "nowhere"
        yield with_passport(name, json.dumps({**facts, "digest": digest}).encode() + b"\n" + content, home=home)
    for name, content in damaged(made.weights).items():
        yield BadInput(kind="weights", name=name, arguments=["checkpoint", "identify", "w"], files={"w": content})


def _changed(content: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a JSON object without each field, and with another value of it."""
    known = json.loads(content)
    for name in known:
        yield f"without {name}", {key: value for key, value in known.items() if key != name}
        for value in (None, -5, "nope", [5], {"x": [1]}):
            if value != known[name]:
                yield f"{name} = {value!r}", {**known, name: value}


def _certificates(_: dict[str, Any], made: Made) -> Iterator[BadInput]:
    keys = {"key.pem": made.key, "key.pub.pem": made.public_key}

    def verified(name: str, content: bytes, key: str = "key.pub.pem") -> BadInput:
        asked = ["forget", "verify", "c.json", "--key", key]
        return BadInput(kind="certificate", name=name, arguments=asked, files={"c.json": content, **keys})

    snapshots = dict.fromkeys(("consumption", "units", "plans", "legs", "row_keys"))
    about = {"id": "x", "format_version": 1, "certified_at": "2026-11-29T00:00:00+00:00", "dlac_version": "1"}
    table = {"table": "src.t", "table_uuid": "x", "filters": ["row_id = 5"], "snapshots": snapshots}
    certificate = {**about, **table, "runs": [], "rows": {}, "script": ""}
    for name, content in damaged(_signed(made.key, certificate)).items():
        yield verified(name, content)
    for name, facts in _changed(json.dumps(certificate).encode()):
        yield verified(f"signed, {name}", _signed(made.key, facts))
    files = {"c.json": _signed(made.key, certificate), **keys}
    for key in ("missing.pem", ".", "loop", "", "c.json", "key.pem", "~nouser/key.pem"):
        arguments = ["forget", "verify", "c.json", "--key", key]
        yield BadInput(kind="key", name=f"public {key!r}", arguments=arguments, files=files, links=LOOP)
    for name, content in damaged(made.key).items():
        yield verified(f"key: {name}", _signed(made.key, certificate), "other.pem")
        asked = ["forget", "rows", "src.t", "--where", "row_id = 5", "--certify", "new.json", "key.pem"]
        yield BadInput(kind="key", name=f"private: {name}", arguments=asked, files={"key.pem": content})


def _signed(key: bytes, certificate: Any) -> bytes:
    if not key:
        return json.dumps({"certificate": certificate}).encode()
    private = load_pem_private_key(key, None)
    assert isinstance(private, Ed25519PrivateKey)
    signature = private.sign(json.dumps(certificate, sort_keys=True, separators=(",", ":")).encode()).hex()
    return json.dumps({"certificate": certificate, "ed25519": signature}).encode()


def _recorded_specs(_: dict[str, Any], made: Made) -> Iterator[BadInput]:
    contents = damaged(made.spec)
    del contents["a changed bit"]  # it may be in a value
    for name, facts in _changed(made.spec):
        if "mixture" not in name and "sequences" not in name:
            contents[name] = json.dumps(facts).encode()
    optional = {f"without {name}" for name in ("params", "listeners", "cluster", "lakehouse", "checkpoint", "read")}
    for name, content in contents.items():
        if name not in optional and content:
            yield BadInput(kind="spec.json", name=name, arguments=["recover", LAUNCHED], recorded=content)
    for command in (["checkpoint", "retire", LAUNCHED], ["checkpoint", "export", LAUNCHED, "out"]):
        yield BadInput(kind="spec.json", name=" ".join(command), arguments=command, recorded=contents["half"])


class _Shell:
    """A value whose unpickling runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("open('ran', 'w')",)


def _adopted(spec: dict[str, Any], made: Made) -> Iterator[BadInput]:
    spec = {**spec, "run": "adopted"}

    def adopted(name: str, files: Mapping[str, bytes], links: Mapping[str, str] = {}) -> BadInput:  # never changed
        asked = ["checkpoint", "adopt", "spec.yaml", "old"]
        placed = {f"old/{file}": content for file, content in files.items()}
        return BadInput(kind="adopt", name=name, arguments=asked, files=placed, links=dict(links), spec=spec)

    pickles = {"of a number": 5, "of a dict": {"model": [1]}, "of a command": _Shell(), "of bytes": b"x" * 99}
    for name, value in pickles.items():
        for file in (".metadata", "model.pt", "pytorch_model.bin", "mp_rank_00_model_states.pt"):
            yield adopted(f"{file}: pickle {name}", {file: pickle.dumps(value)})
    for file in (".metadata", "mp_rank_00_model_states.pt", "model.safetensors", "model.safetensors.index.json"):
        for name, content in damaged(made.weights[:200]).items():
            yield adopted(f"{file}: {name}", {file: content})
    yield adopted("loop", {}, links={"old": "old"})
    yield BadInput(kind="adopt", name="a file", arguments=["checkpoint", "adopt", "spec.yaml", "spec.yaml"], spec=spec)


def _shadows(spec: dict[str, Any], made: Made) -> Iterator[BadInput]:
    whole = json.dumps({"format_version": 1, "rank": 0, "world_size": 1, "step": 0, "started_ns": 5}).encode() + b"\n"

    def shadow(name: str, content: bytes | None) -> BadInput:
        files = {"shadow/README": b""} | ({} if content is None else {"shadow/rank-0.rows": content})
        arguments = ["shadow", "spec.yaml", "shadow", "--by", "row_id"]
        return BadInput(kind="shadow", name=name, arguments=arguments, files=files, spec=spec)

    yield shadow("none", None)
    for name, content in damaged(whole).items():
        yield shadow(name, content if name in ("nothing", "half") else content + b"\n")
        yield shadow(f"records: {name}", whole + (content or b"\xff" * 12))
    for name, facts in _changed(whole):
        yield shadow(name, json.dumps(facts).encode() + b"\n" + b"\xff" * 12)


def _job_files(_: dict[str, Any], made: Made) -> Iterator[BadInput]:
    bomb = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40))])
    for name, content in {
        "many aliases.yaml": bomb.encode(),
        "circle.yaml": b"run: &a [*a]\nsource: &b {x: *b}\n",
        "binary.yaml": bytes(range(256)),
        "half.yaml": b"source: {table: [",
        "tagged.yaml": b"run: !!python/object/apply:os.system ['true']\n",
        "twice.toml": b"run = 'a'\nrun = 'b'\n",
        "deep.yaml": b"[" * 5000,
        "keys.yaml": b"1: 2\nnull: 3\n",
        "latin.toml": "run = 'é'".encode("latin-1"),
    }.items():
        yield BadInput(kind="spec file", name=name, arguments=["plan", name], files={name: content})
    links, files = {"loop.toml": "loop.toml", "dangling.yaml": "nowhere"}, {"folder.toml/x": b""}
    for name in ("loop.toml", "dangling.yaml", "folder.toml", "x" * 300 + ".toml", "loop.toml/x.toml"):
        yield BadInput(kind="spec file", name=repr(name), arguments=["plan", name], links=links, files=files)


def _variables(spec: dict[str, Any], _: Made) -> Iterator[BadInput]:
    def variable(name: str, value: str, arguments: list[str], **facts: Any) -> BadInput:
        environment = {"PET_MASTER_ADDR": "host", name: value} if name == "PET_MASTER_PORT" else {name: value}
        return BadInput(
            kind="variable", name=f"{name}={value!r}", arguments=arguments, environment=environment, **facts
        )

    train = {**spec, "run": "varied", "launch": {**spec["launch"], "script": "missing.py"}}
    for name, values in _TORCHRUN.items():
        yield from (variable(f"PET_{name}", value, TRAIN, spec=train) for value in values)
    for home in (" ", "a\nb", "s3://x", "~nouser/x", "loop", "file", "/dev/null", "x" * 300, "missing"):
        yield variable("DLAC_HOME", home, ["runs"], links=LOOP, files={"file": b""})


_TORCHRUN = {
    "NNODES": ["many", "3:2"],
    "NPROC_PER_NODE": ["0", "many", ""],
    "RDZV_CONF": ["nope=1", "timeout=many", "="],
    "RDZV_ENDPOINT": ["host:port", "host:99999"],
    "MASTER_PORT": ["many"],
}


def _registered(_: dict[str, Any], made: Made) -> Iterator[BadInput]:
    for name, content in damaged(made.parquet[-300:]).items():
        arguments = ["table", "register", "new.files", "data"]
        yield BadInput(kind="Parquet", name=name, arguments=arguments, files={"data/a.parquet": content})
    for place in ("", "missing", "nope://x", "s3://", "loop", "~nouser/x", "x" * 300, "[", "data/*.csv", "/dev/null"):
        arguments = ["table", "register", "new.files", place]
        yield BadInput(kind="Parquet", name=f"at {place!r}", arguments=arguments, files={"data/b": b""}, links=LOOP)


def _places(spec: dict[str, Any], _: Made) -> Iterator[BadInput]:
    """Yield folders and files that commands write to."""
    finished, files = {**spec, "run": FINISHED}, {"file": b"", "file.pub.pem": b""}
    of_run = [FINISHED, "--spec", "spec.yaml"]
    commands = [
        ["forget", "new-key"],
        ["init", "src.t", "--into"],
        ["checkpoint", "export-state", *of_run],
        ["rehearse", *of_run, "--sandbox"],
    ]
    for place in ("/dev/null/x", "loop", "loop/x", "~nouser/x", "x" * 300, "file", "file/x"):
        common: dict[str, Any] = {"kind": "place", "links": LOOP, "files": files}
        for name in ("store", "local"):
            changed = {**spec, "run": "placed", "checkpoint": {name: place, "memory": ""}}
            yield BadInput(name=f"checkpoint.{name} = {place!r}", arguments=TRAIN, spec=changed, **common)
        for command in commands:
            yield BadInput(name=f"{command[0]} {place!r}", arguments=[*command, place], spec=finished, **common)
