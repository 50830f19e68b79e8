"""Commands that look at runs: `dlac status`, `dlac runs` and `dlac incidents`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from dlac_pipeline.audit.wording import format_age, format_count, format_duration
from dlac_pipeline.cli import shared as ui
from dlac_pipeline.extensions.look.display import describe_status, watch_run
from dlac_pipeline.spec.bounds import LONGEST_WAIT_S

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.ledger.recoveries import Recovery

PANEL = "Look"


@ui.extension_command("dlac status my-run", "dlac status my-run --watch", "dlac status my-run --json")
def status(
    run: ui.RunName,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
    watch: Annotated[
        bool,
        Option(
            "--watch",
            help="Show it each second until the run is finished or Ctrl-C. Outside a terminal: as JSON lines.",
        ),
    ] = False,
    every_s: Annotated[
        float,
        Option(help="Seconds between two updates of --watch.", min=0.1, max=LONGEST_WAIT_S, callback=ui.check_number),
    ] = 1.0,
) -> None:
    """Show the state of a run: step, loss, last checkpoint, attempt, goodput, exclusions of rewinds.

    With --watch also its present work.
    """
    options = ui.place_options(spec, home)
    if watch:
        watch_run(lambda: ui.lakehouse_of(spec, home), run, ui.OUT, every_s=every_s, as_json=as_json, options=options)
        return
    from dlac_pipeline.extensions.look.run_state import run_status

    facts = run_status(ui.lakehouse_of(spec, home), run)
    if as_json:
        ui.show_json({**facts, "next_command": ui.command_with(facts["next_command"], options)})
    else:
        ui.OUT.print(ui.facts_table(describe_status(facts, options)))


@ui.extension_command("dlac runs", "dlac runs --json")
def runs(home: ui.Home = None, spec: ui.SpecOption = None, as_json: ui.AsJson = False) -> None:
    """List the runs of a lakehouse, by their last commit: state, step, last checkpoint, attempts."""
    from dlac_pipeline.extensions.look.run_state import list_runs

    found = list_runs(ui.lakehouse_of(spec, home))
    if as_json:
        ui.show_json(found)
        return
    names = ("run", "state", "step", "checkpoint", "attempts")
    rows = []
    for each in found:
        step = f"{each['step']:,}" + (f"/{total:,}" if (total := each["total_steps"]) else "")
        committed = format_age(each["head_committed_at"]) or "none yet"
        rows.append((each["run"], each["launch"], step, committed, f"{each['attempts']:,}"))
    ui.show_table(names, rows, right=("step", "attempts"), empty="no run yet: `dlac train SPEC` starts one")


@ui.extension_command("dlac incidents my-run", "dlac incidents --json")
def incidents(
    run: Annotated[
        str | None,
        Argument(
            help="Name of the training run. Unset: all runs.",
            callback=ui.check_run,
        ),
    ] = None,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
) -> None:
    """List recoveries: cause, how the failure was noticed, seconds of each phase, rows replayed, work lost, outcome.

    For one run, a table of the groups that were present follows, if it trains in groups. JSON has the recoveries only.
    """
    from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
    from dlac_pipeline.lakehouse.ledger.typed_rows import MembershipRow

    ledger = ui.ledger_of(spec, home)
    if run is not None:
        ledger.head_rows(run)  # raises if there is no such run
    found = recoveries_of(ledger.lakehouse, run)
    if as_json:
        ui.show_json([{**asdict(each), "down_s": each.down_s, "recovered_s": each.recovered_s} for each in found])
        return
    if not found:
        ui.show_text(f"no incident of {'any run' if run is None else f'run {run}'}")
    for each in found:
        ui.OUT.print(ui.facts_table(describe_incident(each)), "", sep="")
    if run is not None and (changes := ledger.rows(run, kinds=(MembershipRow,))):
        names = ("from step", "attempt", "groups present")
        present = [(f"{row.first_step:,}", str(row.attempt), ", ".join(map(str, row.groups))) for row in changes]
        ui.show_table(names, present, right=names[:2], empty="")


def describe_incident(recovery: "Recovery") -> dict[str, str | None]:
    """Write an incident down for people: a label and a text each, without the phases that took no time."""
    down, took = recovery.down_s, format_duration(recovery.recovered_s)
    lost = None if recovery.work_lost_s is None else f"{format_duration(recovery.work_lost_s)} of training"
    replayed = f"{format_count(recovery.rows_replayed, 'row')} replayed"
    gave_up = recovery.outcome == "gave up"
    return {
        "run": recovery.run,
        "failed": f"{recovery.failed_at:%Y-%m-%d %H:%M:%S} UTC, attempt {recovery.replaced_attempt}",
        "cause": recovery.cause,
        "noticed by": recovery.noticed_by,
        "down": f"{format_duration(down)} until an operator started it again" if down else None,
        "outcome": "gave up"
        if gave_up
        else f"{recovery.outcome} at step {recovery.resumed_step:,} (attempt {recovery.attempt})",
        "recovery" if not gave_up else "ended": f"{took}: {_phases(recovery)}" if _phases(recovery) else took,
        "lost": None if gave_up else replayed + (f", {lost}" if lost else ""),
    }


def _phases(recovery: "Recovery") -> str:
    """Return the phases that took time, in order. Older rows do not have all of them."""
    from dlac_pipeline.lakehouse.ledger.recoveries import PHASES

    shown = [name for name in PHASES if name != "total" and not (name == "detect" and recovery.down_s)]
    seconds = {name.replace("_", " "): getattr(recovery, f"{name}_s") for name in shown}
    return ", ".join(f"{name} {format_duration(value)}" for name, value in seconds.items() if value)
