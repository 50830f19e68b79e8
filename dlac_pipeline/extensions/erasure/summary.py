"""Summaries of the training data of a model, by the ledger, in a form that the public is owed."""

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from dlac_pipeline.audit.audit import audit_open_run, open_run
from dlac_pipeline.audit.lakehouse_sql import rows_of, sql_script
from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

_AUDIT = "totals problems advances slices units "


def training_content(lakehouse: Lakehouse, run: str, checkpoint: str | None = None) -> list[dict[str, Any]]:
    """Return the audit of a run, with its `sources`, and of each run that it was forked from, the newest first.

    An id or a step selects an earlier state. Raises as `open_run`.
    """
    found: list[dict[str, Any]] = []
    script = sql_script("trained_on")
    at: tuple[str, str | None] | None = (run, checkpoint)
    while at is not None:
        with open_run(lakehouse, *at, query=_AUDIT + script) as connection:
            report = audit_open_run(lakehouse, connection, at[0]).to_json()
            found.append({**report, "sources": rows_of(connection, script, [at[0]])})
            forked = "SELECT forked_run, forked_from FROM lineage WHERE run = ? AND forked_from IS NOT NULL"
            at = next(((row["forked_run"], row["forked_from"]) for row in rows_of(connection, forked, [at[0]])), None)
    return found


def read_template(name: str) -> Template:
    """Return a template for `write_summary`. Raises `SpecInvalid` for an unknown one."""
    known = {each.name.removesuffix(".md"): each for each in (files(__package__) / "templates").iterdir()}
    if name not in known:
        raise SpecInvalid(f"expected one of the templates {sorted(known)!r}, found {name!r}: name one of these")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["cell"] = lambda text: " ".join(str(text).replace("|", "\\|").split())
    return environment.from_string(known[name].read_text())


def write_summary(runs: list[dict[str, Any]], template: Template, *, provenance: str) -> str:
    """Return the text of a template about `training_content`. Raises `NoSuchCheckpoint` if nothing was trained yet."""
    sources = [source for each in runs for source in each["sources"]]
    if not sources:
        raise NoSuchCheckpoint(f"expected a checkpoint of run {runs[0]['run']!r}, found none yet: train it first")
    return template.render(
        provenance=provenance,
        runs=runs,
        newest=runs[0],
        earlier=runs[1:],
        oldest=runs[-1],
        rows_consumed=sum(each["rows_consumed"] for each in runs),
        tokens=sum(each["sources"][0]["tokens"] or 0 for each in runs if each["sources"]),
        since=min(source["since"] for source in sources),
        until=max(source["until"] for source in sources),
        excluded=any(source["excluded"] for source in sources),
        exact=all(each["exact"] for each in runs),
        problems=[problem for each in runs for problem in each["problems"]],
    )
