"""Certificate of a request to forget rows: its state, its limits, and a script that checks it, signed with Ed25519.

The signature is over the canonical JSON. docs/formats.md has the fields.
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.explain import tables_and_views
from dlac_pipeline.audit.lakehouse_sql import names_in, scripts_of, sql_script
from dlac_pipeline.checkpoint.store import folder_uri, tiers_of
from dlac_pipeline.lakehouse.errors import FormatTooNew, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.operations.documents.forget import ForgetPlan, SpecOf, plan_forget
from dlac_pipeline.operations.documents.left_weights import LeftWeights

_FORMAT_VERSION = 1
_HEAD = "-- Request {}: run this in DuckDB without changes. While the rows are forgotten, it returns no row.\n"


def make_key(path: Path) -> Path:
    """Write a private key, which only its owner can read, and the public key beside it. Return the public one's path."""
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
    private, plan = _key_in(key, Ed25519PrivateKey), plan_forget(lakehouse, table, filters)
    if problems := contradictions(lakehouse, plan, spec_of):
        raise SpecInvalid("\n".join([f"expected that request {plan['id']} is met, found otherwise:", *problems]))
    rows, script = plan.pop("rows"), sql_script("forget")
    statement, (tables, views) = rows.pop("statement"), tables_and_views(lakehouse, scripts_of(names_in(script)))
    certificate = {
        **{name: plan[name] for name in ("id", "table", "table_uuid", "filters", "runs")},
        **{"format_version": _FORMAT_VERSION, "rows": rows},
        "certified_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "dlac_version": version("dlac-pipeline"),
        "script": "\n".join([_HEAD.format(plan["id"]), *tables, *views, statement, script, "FROM forget_problems;\n"]),
    }
    document = {"certificate": certificate, "ed25519": private.sign(_canonical(certificate)).hex()}
    _write(file, json.dumps(document, indent=1, sort_keys=True).encode() + b"\n", 0o644)
    return document


def is_signed(document: Any, key: Path) -> bool:
    """Return True if a certificate is as it was when the owner of this public key signed it."""
    try:
        _key_in(key, Ed25519PublicKey).verify(bytes.fromhex(document["ed25519"]), _canonical(document["certificate"]))
    except (InvalidSignature, KeyError, TypeError, ValueError):
        return False
    return True


def differences(lakehouse: Lakehouse, certificate: Mapping[str, Any], spec_of: SpecOf) -> list[str]:
    """Return the differences of the lakehouse from a certificate. Later steps of a run are none. Raises `FormatTooNew`."""
    if (found := certificate["format_version"]) > _FORMAT_VERSION:
        raise FormatTooNew(f"expected format_version {_FORMAT_VERSION} of a certificate, found {found}: upgrade DLAC")
    plan, rows = plan_forget(lakehouse, certificate["table"], certificate["filters"]), certificate["rows"]
    found = contradictions(lakehouse, plan, spec_of)
    if (plan["id"], plan["rows"]["sha256"]) != (certificate["id"], rows["sha256"]):
        now = f"{plan['rows']['count']} of table {plan['table_uuid']}"
        found.append(f"expected the {rows['count']} certified rows of table {certificate['table_uuid']}, found {now}")
    for run in certificate["runs"]:
        head = checkpoint_rows(Ledger(lakehouse).head_rows(run["run"])).get(run["head"])
        if run["head"] and (head is None or head.model_digest != run["head_model_digest"]):
            found.append(f"run {run['run']}: expected the certified model of {run['head']}, found none or another one")
    return found


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
            f"run {name}: expected no weights in {place}, found some: run dlac forget with --execute, or remove it"
            for place in sorted(left)
        ]
    return found


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
        raise SpecInvalid(f"expected an Ed25519 key in {str(path)!r}, found {err}: see `dlac new-key --help`") from err
    return key
