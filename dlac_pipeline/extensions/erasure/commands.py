"""Erasure of rows from models, and its certificate."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dlac_pipeline.audit.wording import format_count
from dlac_pipeline.cli import shared as ui

if TYPE_CHECKING:
    from dlac_pipeline.extensions.erasure.forget import ForgetPlan
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
    from dlac_pipeline.spec.job_spec import JobSpec

PANEL = "Audit"
forget = typer.Typer(help="Group: remove rows from all models, and certify it.", no_args_is_help=True)
Specs = Annotated[list[Path] | None, Option("--spec", help="Job spec of a run from another node. Can be repeated.")]


@ui.command(
    forget,
    None,
    'dlac forget rows lake.docs --where "doc_id = 4711"',
    'dlac forget rows lake.docs --where "doc_id = 4711" --execute',
    'dlac forget rows lake.docs --where "doc_id = 4711" --certify certificate.json key.pem',
    name="rows",
)
def forget_rows(
    table: Annotated[str, Argument(help="Table with the rows.")],
    where: Annotated[list[str], Option(help='Rows to forget, e.g. "doc_id = 4711". The option can be repeated.')],
    execute: Annotated[bool, Option("--execute", help="Rewind the runs, and retire affected checkpoints.")] = False,
    certify: Annotated[
        tuple[Path, Path] | None, Option(metavar="FILE KEY", help="Write a certificate, signed with a private key.")
    ] = None,
    spec: Specs = None,
    home: ui.Home = None,
    as_json: ui.AsJson = False,
) -> None:
    """Plan the removal of rows from all models: the checkpoints that have seen them, in all runs and forks, and the cost.

    Only --execute changes the lakehouse. Exported files are listed, and not touched. With --execute the exit status is 0 only if
    the rows are forgotten.
    """
    from dlac_pipeline.extensions.erasure import certificate
    from dlac_pipeline.extensions.erasure.execution import execute_forget
    from dlac_pipeline.extensions.erasure.forget import plan_forget

    lakehouse, spec_of = _places(spec, home)
    done = execute_forget(lakehouse, table, where, spec_of) if execute else []
    if certify is not None:
        certificate.certify(lakehouse, table, where, spec_of, file=certify[0], key=certify[1])
    plan = plan_forget(lakehouse, table, where)
    if as_json:
        ui.show_json(plan | {"done": done})
    else:
        _show(plan, done)
    if execute and plan["problems"]:
        raise typer.Exit(1)


def _show(plan: "ForgetPlan", done: list[str]) -> None:
    rows, files = (format_count(plan["rows"][name], noun) for name, noun in (("count", "row"), ("files", "data file")))
    ui.show_text("\n".join([*done, f"request {plan['id']}: {rows} in {files}"]))
    for run in plan["runs"]:
        ui.show_facts({name: value for name, value in run.items() if name != "affected"}, as_json=False)
    ui.show_text("\n".join(plan["problems"] or ["the rows are forgotten"]))


@ui.command(forget, None, 'dlac forget traces lake.docs --where "doc_id = 4711"', name="traces")
def forget_traces(
    table: Annotated[str, Argument(help="Table with the rows.")],
    where: Annotated[list[str], Option(help="Filters of a request to `dlac forget rows` that is met.")],
    spec: Specs = None,
    home: ui.Home = None,
) -> None:
    """Erase the keys of forgotten rows, and the losses of their steps, in DLAC's tables. Certify before this."""
    from dlac_pipeline.extensions.erasure.traces import erase_traces

    lakehouse, spec_of = _places(spec, home)
    done = erase_traces(lakehouse, table, where, spec_of)
    ui.show_text("\n".join(done or ["no traces are left"]))


@ui.command(forget, None, "dlac forget new-key key.pem")
def new_key(key: Annotated[Path, Argument(help="New file for the private key.")]) -> None:
    """Make a key that signs certificates, and the public key that checks them, in the same folder."""
    from dlac_pipeline.extensions.erasure.certificate import make_key

    ui.show_text(f"certificates that {key} signs are checked with {make_key(key)}")


@ui.command(forget, None, "dlac forget verify certificate.json --key key.pub.pem", name="verify")
def verify_certificate(
    file: Annotated[Path, Argument(help="Certificate of `dlac forget rows`.")],
    key: Annotated[Path, Option(help="Public key of its signer.")],
    spec: Specs = None,
    home: ui.Home = None,
) -> None:
    """Check the signature of a certificate, and the lakehouse again. Exit status 0 only if both are as certified."""
    from dlac_pipeline.extensions.erasure.certificate import (
        differences,
        has_old_snapshots,
        is_signed,
        read_document,
    )

    document = read_document(file)
    if not is_signed(document, key):
        ui.show_text("the signature does not match: the certificate was changed, or signed with another key")
        raise typer.Exit(1)
    lakehouse, spec_of = _places(spec, home)
    found = differences(lakehouse, certificate := document["certificate"], spec_of)
    notes = ["the signature matches"]
    if has_old_snapshots(lakehouse, certificate):
        notes.append(
            "the files in the script were not compared: upkeep has removed snapshots, so certify again for a new one"
        )
    ui.show_text("\n".join([*notes, *(found or ["the lakehouse is as certified"])]))
    if found:
        raise typer.Exit(1)


def _places(specs: list[Path] | None, home: Path | None) -> "tuple[Lakehouse, Callable[[str], JobSpec | None]]":
    """Return the lakehouse, and a function from a run to its job spec."""
    given = {each.run: each for each in (ui.resolved(path, home) for path in specs or ())}
    lakehouse = ui.lakehouse_of(specs[0] if specs else None, home)
    return lakehouse, lambda run: given.get(run) or ui.known_spec(lakehouse, run, None, home)
