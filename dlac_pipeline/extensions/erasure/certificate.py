"""Certificate of a request to forget rows: its state, its limits, and a script that checks it, signed with Ed25519.

The signature is over the canonical JSON. docs/extensions/erasure.md has the fields.
"""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pyiceberg.table.snapshots import Snapshot

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import names_in, scripts_of, sql_script
from dlac_pipeline.checkpoint.store import folder_uri, tiers_of
from dlac_pipeline.extensions.erasure.explain import EXPLAINED, tables_and_views
from dlac_pipeline.extensions.erasure.forget import ForgetPlan, Moment, SpecOf, plan_forget
from dlac_pipeline.extensions.erasure.left_weights import LeftWeights
from dlac_pipeline.lakehouse.errors import FormatTooNew, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS
from dlac_pipeline.lakehouse.store_files import StoreFiles

_FORMAT_VERSION = 1
_REQUEST = ("id", "table", "table_uuid", "filters")
_FIELDS = {
    **{"id": str, "table": str, "table_uuid": str, "filters": list, "runs": list, "rows": dict, "script": str},
    **{"format_version": int, "certified_at": str, "dlac_version": str, "snapshots": dict},
}
_SKEW = timedelta(seconds=10)
"""Difference of two nodes' clocks, at the most."""
_EPOCH = datetime.fromtimestamp(0, UTC)
_FILES = re.compile(r"(?<=read_parquet\(\[\n).*?(?=\n\])", re.DOTALL)
"""The list of data files of a table in a script."""
_HEAD = "-- Request {}: run this in DuckDB without changes. While the rows are forgotten, it returns no row.\n"


def make_key(path: Path) -> Path:
    """Write a private key, which only its owner can read, and the public key beside it. Return the public one's path."""
    if not path.name:
        raise SpecInvalid(f"expected a new file for the key, found {str(path)!r}: name one, such as key.pem")
    key, public = Ed25519PrivateKey.generate(), path.with_suffix(".pub.pem")
    _write(path, key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()), 0o600)
    _write(public, key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo), 0o644)
    return public


def certify(
    lakehouse: Lakehouse, table: str, filters: Sequence[str], spec_of: SpecOf, *, file: Path, key: Path
) -> dict[str, Any]:
    """Write a certificate to a new file, signed with a private key. Return it.

    Raises `SpecInvalid`, which names each contradiction, if the request is not met.
    """
    private, at = _key_in(key, Ed25519PrivateKey), datetime.now(UTC)
    plan = plan_forget(lakehouse, table, filters)
    if problems := contradictions(lakehouse, plan, spec_of):
        raise SpecInvalid("\n".join([f"expected that request {plan['id']} is met, found otherwise:", *problems]))
    snapshots = {name: lakehouse.own(name).metadata.current_snapshot_id for name in EXPLAINED}
    certificate = {
        **_state(plan),
        "format_version": _FORMAT_VERSION,
        "certified_at": at.isoformat(timespec="milliseconds"),
        "dlac_version": version("dlac-pipeline"),
        "snapshots": snapshots,
        "script": _script(lakehouse, plan, snapshots),
    }
    document = {"certificate": certificate, "ed25519": private.sign(_canonical(certificate)).hex()}
    _write(file, json.dumps(document, indent=1, sort_keys=True).encode() + b"\n", 0o644)
    return document


def read_document(file: Path) -> Any:
    """Return the JSON of a certificate with its signature. Raises `SpecInvalid` for another file."""
    try:
        document = json.loads(file.read_text())
        _canonical(document)
    except (OSError, ValueError, RecursionError) as err:
        raise SpecInvalid(f"expected a certificate of `dlac forget rows`, found {str(file)!r}: {err}") from err
    return document


def is_signed(document: Any, key: Path) -> bool:
    """Return True if a certificate is as it was when the owner of this public key signed it."""
    try:
        _key_in(key, Ed25519PublicKey).verify(bytes.fromhex(document["ed25519"]), _canonical(document["certificate"]))
    except (InvalidSignature, KeyError, TypeError, ValueError, RecursionError):
        return False
    return True


def differences(lakehouse: Lakehouse, certificate: Any, spec_of: SpecOf) -> list[str]:
    """Return the differences of the lakehouse from a certificate. Later steps of a run are none.

    All that a certificate states is computed again, for the moment of the certificate. Nothing of its script is run. Raises
    `SpecInvalid` for one that is not of `certify`, and `FormatTooNew`.
    """
    moment = _check_fields(certificate)
    table, filters = certificate["table"], certificate["filters"]
    found = contradictions(lakehouse, plan_forget(lakehouse, table, filters), spec_of)
    then = plan_forget(lakehouse, table, filters, moment=moment)
    found += [f"at {certificate['certified_at']}: {each}" for each in then["problems"] if each not in found]
    found += _differing(certificate, json.loads(_canonical(_state(then))))
    found += _date_problems(lakehouse, moment)
    return found + _script_problems(lakehouse, certificate, then, moment)


def has_old_snapshots(lakehouse: Lakehouse, certificate: Mapping[str, Any]) -> bool:
    """Return True if the script names files of snapshots that have expired, so that they cannot be compared."""
    known = [lakehouse.own(name).snapshot_by_id(each) for name, each in certificate["snapshots"].items() if each]
    return None in known


def contradictions(lakehouse: Lakehouse, plan: ForgetPlan, spec_of: SpecOf) -> list[str]:
    """Return the contradictions to a request that is met: in the ledger, in the audits, in the stores, and in memory."""
    found = list(plan["problems"])
    for run in plan["runs"]:
        name, spec = run["run"], spec_of(run["run"])
        if not audit_run(lakehouse, name).exact:
            found.append(f"run {name}: expected an exact audit, found otherwise: see `dlac audit {name}`")
        files = tiers_of(spec).files if spec else StoreFiles(lakehouse.config.properties)
        known = checkpoint_rows(Ledger(lakehouse).head_rows(name))
        affected = run["affected"] or ()
        gone = [folder_uri(known[each].manifest_uri) for each in affected]
        left = {folder for folder in gone if files.children(folder)}
        left.update(LeftWeights(lakehouse, spec, affected).find() if spec else ())
        found += [
            f"run {name}: expected no weights in {place}, found some: run dlac forget rows with --execute, or remove it"
            for place in sorted(left)
        ]
    return found


def _state(plan: ForgetPlan) -> dict[str, Any]:
    """Return the fields of a certificate that state the content of a plan."""
    rows = {name: value for name, value in plan["rows"].items() if name != "statement"}
    return {**{name: plan[name] for name in ("id", "table", "table_uuid", "filters", "runs")}, "rows": rows}


def _script(lakehouse: Lakehouse, plan: ForgetPlan, snapshots: Mapping[str, int | None]) -> str:
    script, statement = sql_script("forget"), plan["rows"]["statement"] or ""
    tables, views = tables_and_views(lakehouse, scripts_of(names_in(script)), snapshots=snapshots)
    return "\n".join([_HEAD.format(plan["id"]), *tables, *views, statement, script, "FROM forget_problems;\n"])


def _check_fields(certificate: Any) -> Moment:
    """Return the moment of a certificate. Raises `SpecInvalid` for fields that no certificate has, and `FormatTooNew`."""
    try:
        if type(found := certificate["format_version"]) is int and found > _FORMAT_VERSION:
            raise FormatTooNew(
                f"expected format_version {_FORMAT_VERSION} of a certificate, found {found}: upgrade DLAC"
            )
        wrong = [name for name, kind in _FIELDS.items() if type(certificate[name]) is not kind]
        wrong += sorted(certificate.keys() - _FIELDS.keys())
        at, seqs = datetime.fromisoformat(certificate["certified_at"]), {}
        for run in certificate["runs"]:
            seqs[run["run"]] = run["seq"]
        wrong += ["filters"] if not all(type(each) is str for each in certificate["filters"]) else []
        wrong += ["runs"] if len(seqs) < len(certificate["runs"]) or not all(map(_is_number, seqs.values())) else []
        numbers = [each for each in certificate["snapshots"].values() if each is not None]
        wrong += ["snapshots"] if not all(map(_is_number, numbers)) else []
        wrong += ["snapshots"] if certificate["snapshots"].keys() != set(EXPLAINED) else []
        json.dumps(certificate, ensure_ascii=False).encode()
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise SpecInvalid(
            f"expected the fields of a certificate of `dlac forget rows`, found {err!r}: ask its signer"
        ) from err
    if wrong or certificate["format_version"] != _FORMAT_VERSION or at.tzinfo is None:
        wrong = wrong or ["format_version or certified_at"]
        raise SpecInvalid(
            f"expected the fields of a certificate of `dlac forget rows`, found {wrong!r}: ask its signer"
        )
    return Moment(at=at, seqs=seqs)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _differing(certificate: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the fields that differ from their recomputed values."""
    wanted, runs = ({run["run"]: run for run in each["runs"]} for each in (now, certificate))
    found = []
    if wanted.keys() != runs.keys():
        found.append(f"expected in the certificate the runs {sorted(wanted)!r}, found {sorted(runs)!r}")
    for name in sorted(wanted.keys() & runs.keys()):
        # `dlac forget traces` empties the losses
        erased = {"losses_of_checkpoints"} if wanted[name]["losses_of_checkpoints"] is None else set()
        found += _unequal(f"run {name}", runs[name], wanted[name], but=erased)
    found += _unequal("rows", certificate["rows"], now["rows"])
    return found + _unequal(
        "request", {each: certificate[each] for each in _REQUEST}, now, but=now.keys() - set(_REQUEST)
    )


def _unequal(what: str, certified: Mapping[str, Any], now: Mapping[str, Any], but: Collection[str] = ()) -> list[str]:
    names = sorted((certified.keys() | now.keys()) - set(but))
    wrong = [name for name in names if name not in certified or name not in now or certified[name] != now[name]]
    return [
        f"{what}: expected the {name} that the lakehouse has, found another one in the certificate" for name in wrong
    ]


def _date_problems(lakehouse: Lakehouse, moment: Moment) -> list[str]:
    """Return what contradicts that the certificate is of its date: later rows that it has, and earlier ones that it lacks."""
    found = []
    if moment.at > datetime.now(UTC) + _SKEW:
        found.append(f"expected a certificate of the past, found one of {moment.at}")
    for run, seq in moment.seqs.items():
        times = [(row.seq, row.committed_at) for row in Ledger(lakehouse).rows(run, kinds=HEAD_KINDS)]
        later = [each for each, at in times if each <= seq and at > moment.at + _SKEW]
        lacking = [each for each, at in times if each > seq and at < moment.at - _SKEW]
        if later or lacking:
            found.append(f"run {run}: expected the ledger up to seq {seq} at {moment.at}, found it at another time")
    return found


def _script_problems(
    lakehouse: Lakehouse, certificate: Mapping[str, Any], then: ForgetPlan, moment: Moment
) -> list[str]:
    """Return what differs in the script. Files of expired snapshots are not compared."""
    certified, is_old = certificate["snapshots"], has_old_snapshots(lakehouse, certificate)
    tables = {name: lakehouse.own(name).metadata for name in certified}
    found = [
        f"expected the script to read table {name} as of {moment.at}, found another snapshot of it"
        for name, table in tables.items()
        if not _is_snapshot_of(table.snapshots, certified[name], moment)
        or (certified[name] is None and name != "row_keys")
    ]
    known = {name: each and (tables[name].current_snapshot_id if is_old else each) for name, each in certified.items()}
    wanted = _script(lakehouse, then, known)
    if _FILES.sub("", certificate["script"]) != _FILES.sub("", wanted):
        made_by, mine = certificate["dlac_version"], version("dlac-pipeline")
        found.append(f"expected the script of DLAC {mine}, found another one in a certificate of DLAC {made_by}")
    elif not is_old and _files_in(certificate["script"]) != _files_in(wanted):
        found.append("expected the script to read the files of the ledger at that time, found others")
    return found


def _is_snapshot_of(known: Sequence[Snapshot], snapshot: int | None, moment: Moment) -> bool:
    """Return whether a snapshot was the current one of a table at a moment, as far as its snapshots have not expired."""
    at, skew = (1000 * each.total_seconds() for each in (moment.at - _EPOCH, _SKEW))
    last = max((each.timestamp_ms for each in known if each.timestamp_ms < at - skew), default=None)
    is_complete = min((each.sequence_number or 0 for each in known), default=1) <= 1
    near = {each.snapshot_id for each in known if (last or 0) <= each.timestamp_ms <= at + skew}
    return snapshot in near or (last is None and (snapshot is None or not is_complete))


def _files_in(script: str) -> list[str]:
    """Return the names of the files in the lists of a script. A lakehouse may have moved since."""
    return [path.rsplit("/", 1)[-1] for each in _FILES.findall(script) for path in each.splitlines()]


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    except OSError as err:
        raise SpecInvalid(f"expected to write the new file {str(path)!r}, found {err}: name another one") from err


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _key_in(path: Path, kind: Any) -> Any:
    try:
        content = path.read_bytes()
        key = pem.load_pem_private_key(content, None) if kind is Ed25519PrivateKey else pem.load_pem_public_key(content)
        assert isinstance(key, kind), f"a {type(key).__name__}"
    except (OSError, ValueError, TypeError, AssertionError) as err:
        raise SpecInvalid(
            f"expected an Ed25519 key in {str(path)!r}, found {err}: see `dlac forget new-key --help`"
        ) from err
    return key
