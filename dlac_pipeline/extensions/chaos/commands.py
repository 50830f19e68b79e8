"""Chaos: faults on a run of a job, their healing, and the audit."""

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from dlac_pipeline.audit.wording import format_duration
from dlac_pipeline.cli import shared as ui
from dlac_pipeline.extensions.chaos.faults import (
    KINDS,
    OWN_KINDS,
    PlannedFault,
    Schedule,
    check_kinds,
    draw_faults,
    parse_kill,
    parse_seconds,
)
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.run_rows import check_run_name
from dlac_pipeline.lakehouse.plain_json import strict_json
from dlac_pipeline.spec.bounds import MOST_STEPS
from dlac_pipeline.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from dlac_pipeline.extensions.chaos.campaign import ChaosPlan
    from dlac_pipeline.extensions.chaos.report import ChaosReport

PANEL = "Recover"
_MOST_FAULTS = 1_000_000
_MOST_IN_A_ROW = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """Options of the command."""

    kill: Annotated[
        list[str] | None,
        Option(help="Fault, as KIND@step=N, or KIND@60s after the first step, or rank:K@step=N. Repeat it for more."),
    ] = None
    every: Annotated[
        str | None,
        Option(help="Inject faults at random times, with this mean time from a healing to the next one, such as 60s."),
    ] = None
    kinds: Annotated[
        str | None,
        Option(
            help=f"With --every: kinds to draw from, as a,b. All: {', '.join(KINDS)}. Unset: {', '.join(OWN_KINDS)}."
        ),
    ] = None
    seed: Annotated[int, Option(min=0, max=2**63, help="The same seed chooses the same kinds and targets.")] = 0
    faults: Annotated[
        int | None,
        Option(
            min=1,
            max=_MOST_FAULTS,
            help="With --every: faults at most, not counting the others of a cascade. Unset: until the run ends.",
        ),
    ] = None
    cascade: Annotated[
        int, Option(min=1, max=_MOST_IN_A_ROW, help="Faults in a row: one, and others during the recovery from it.")
    ] = 1
    away: Annotated[str, Option(help="Time for which store, catalog or network are unavailable.")] = "8s"
    healed_within: Annotated[str, Option(help="Time in which each fault must be healed.")] = "300s"
    steps: Annotated[int | None, Option(min=1, max=MOST_STEPS, help="Steps of the run. Unset: as the job says.")] = None
    run: Annotated[str | None, Option(help="Name of the new run. Unset: the job's name and -chaos.")] = None
    out: Annotated[Path | None, Option(help="JSON file for the report.")] = None


def _takes_options(command: ui.Command) -> ui.Command:
    """Let a command take the fields of `_Options` in place of its `**options`."""
    own = inspect.signature(command)
    named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    taken = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(_Options)
    ]
    command.__dict__["__signature__"] = own.replace(parameters=[*named, *taken])
    return command


@ui.extension_command(
    "dlac chaos job.toml --kill rank@step=120 --kill supervisor@60s --steps 1000",
    "dlac chaos job.toml --every 60s --kinds rank,node,checkpoint --seed 7 --out chaos.json",
    "dlac chaos job.toml --every 5m --cascade 3",
)
@_takes_options
def chaos(spec: ui.SpecFile, home: ui.Home = None, **options: Any) -> None:
    """Train a new run of a job, inject faults, wait until each is healed, and audit it. Exit status 0 only if it is exact.

    The job's own run is not touched. Each supervisor that a fault ends is started again, like by an orchestrator.
    """
    from dlac_pipeline.audit.table import audit_table
    from dlac_pipeline.extensions.chaos.chaos_job import chaos_spec, restore_catalog_of
    from dlac_pipeline.extensions.chaos.ending_signals import end_on_signals
    from dlac_pipeline.extensions.chaos.report import inject_faults

    chosen = _Options(**options)
    if chosen.out is not None and not chosen.out.parent.is_dir():
        raise SpecInvalid(f"expected an existing folder for --out, found none at {str(chosen.out.parent)!r}: make it")
    if chosen.out is not None and chosen.out.is_dir():
        raise SpecInvalid(f"expected a file for --out, found the folder {str(chosen.out)!r}: name a file in it")
    end_on_signals()
    job = ui.resolved(spec, home)
    run = check_run_name(chosen.run or f"{job.run}-chaos")
    job = chaos_spec(job, run=run, steps=chosen.steps, cascade=chosen.cascade)
    plan = _plan_of(chosen, job)
    if restored := restore_catalog_of(job):
        ui.show_text(f"the catalog {str(restored)!r} was moved back: a command killed in an outage had left it aside")
    report = inject_faults(job, ui.lakehouse_of(spec, home, create=True), plan, say=ui.show_text)
    _show_faults(report)
    if report.audit is not None:
        ui.OUT.print(audit_table(report.audit))
    ui.show_text(report.summary)
    if chosen.out is not None:
        chosen.out.write_text(strict_json(report.to_json()) + "\n")
    if report.failure is not None:
        raise report.failure
    if report.audit is None or not report.audit.exact:
        raise typer.Exit(1)


def _plan_of(chosen: _Options, job: JobSpec) -> "ChaosPlan":
    """Return the plan that the options mean. Raise `SpecInvalid` for options that contradict each other or the job."""
    from dlac_pipeline.extensions.chaos.campaign import ChaosPlan

    healed_within_s = parse_seconds(chosen.healed_within)
    if (chosen.kill is None) == (chosen.every is None):
        found = "neither" if chosen.kill is None else "both"
        raise SpecInvalid(
            f"expected --kill or --every, found {found}: name faults, as --kill rank@step=120, or --every 60s"
        )
    if chosen.kill is not None and (chosen.kinds is not None or chosen.faults is not None):
        raise SpecInvalid("expected --kinds and --faults with --every only, found one with --kill: leave it out")
    if chosen.kill is not None:
        chance = random.Random(chosen.seed)
        listed = [parse_kill(text, seed=chance.randrange(2**32)) for text in chosen.kill]
        kinds = list(dict.fromkeys(fault.kind for fault in listed))
        schedule = Schedule(listed)
    else:
        kinds = [] if chosen.kinds is None else [kind.strip() for kind in chosen.kinds.split(",")]
        if not kinds:
            reasons = {kind: _reason_against(kind, job, healed_within_s) for kind in OWN_KINDS}
            kinds = [kind for kind in OWN_KINDS if not reasons[kind]]
            ui.show_text(f"kinds: {', '.join(kinds)}")
            for kind in filter(reasons.get, reasons):
                ui.show_text(f"without {kind}: {reasons[kind]}")
        every_s = parse_seconds(chosen.every or "")
        schedule = Schedule(drawn=draw_faults(kinds, every_s=every_s, seed=chosen.seed, faults=chosen.faults))
    _check_targets(kinds, schedule.listed, job, healed_within_s)
    return ChaosPlan(
        schedule=schedule,
        kinds=kinds,
        cascade=chosen.cascade,
        away_s=parse_seconds(chosen.away),
        healed_within_s=healed_within_s,
    )


def _check_targets(kinds: Sequence[str], listed: Sequence[PlannedFault], job: JobSpec, healed_within_s: float) -> None:
    """Raise `SpecInvalid` for a kind or a rank that the job's settings exclude."""
    check_kinds(kinds)
    for kind in kinds:
        if reason := _reason_against(kind, job, healed_within_s):
            raise SpecInvalid(f"the kind {kind} is not possible: {reason}")
    ranks = job.launch.world_size
    for fault in listed:
        if not job.launch.nodes and (fault.rank or 0) >= ranks:
            raise SpecInvalid(
                f"expected a rank below launch.world_size = {ranks}, found rank {fault.rank}: name another one"
            )


def _reason_against(kind: str, job: JobSpec, healed_within_s: float) -> str:
    """Return why the job's settings exclude a kind, and what to do. Empty if they do not."""
    if kind == "hang" and job.launch.hang_timeout_s >= healed_within_s:
        return (
            f"expected launch.hang_timeout_s below --healed-within, found {job.launch.hang_timeout_s:g} s and "
            f"{healed_within_s:g} s: change one of them, or leave hang out"
        )
    if kind == "checkpoint" and job.checkpoint.keep_last == 1:
        return (
            "expected checkpoint.keep_last of 0, or 2 or more, so that a damaged checkpoint has a parent, found 1: raise it, "
            "or leave checkpoint out"
        )
    return ""


def _show_faults(report: "ChaosReport") -> None:
    names = ("fault", "kind", "at step", "what", "during", "first new step", "attempts", "rows again")
    rows = []
    for fault in report.faults:
        healed = "NOT healed" if fault.recovery_s is None else format_duration(fault.recovery_s)
        facts = [fault.during, healed, fault.attempts, fault.summary.get("rows_replayed")]
        cells = [fault.number, fault.kind, f"{fault.step:,}", fault.what, *facts]
        rows.append(tuple("" if cell is None else str(cell) for cell in cells))
    ui.show_table(
        names, rows, right=("fault", "at step", "during", "attempts", "rows again"), empty="no fault has struck"
    )
