"""The page of the paper's experiments: plots and tables, as HTML, as PDF, and for the docs."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from benchmarks.paper_parts.claims import (
    CLAIM_HEADS,
    TABLE_1_HEADS,
    TABLE_2_HEADS,
    claim_rows,
    table_1_rows,
    table_2_rows,
)
from benchmarks.paper_parts.divergence import BATCH, METHODS, WORLDS, Outcome
from benchmarks.paper_parts.month import DAYS, INTERRUPTIONS, MONTHS, STARTS_S, Goodput, Mode, modes_of, simulate
from benchmarks.paper_parts.programs import PROGRAMS
from benchmarks.paper_parts.summary import Summary, band_of, calm_of, summarize, summarize_undisturbed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Found = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Heads of the columns, and rows."""
_COLORS = {
    "calm": "#bdbdbd",
    "dlac": "#16335b",
    "dlac_dataset": "#3f6fae",
    "stateful": "#d9a441",
    "hf": "#7a9a4f",
    "restart": "#c8553d",
    "deepspeed": "#8b5a8c",
}
_CELL_CHARACTERS = 45
"""Longest line of a cell in the PDF."""
_WINDOW = 12
"""Steps whose mean training loss is drawn as one point."""
_SETTINGS = {
    "stream": "A stream, read once, without shuffle",
    "passes": "A small table, read five times and shuffled",
    "fixed": "The stream again, with two ranks in each launch",
}
_ABOUT = (
    "One process trains on the shares of all ranks, so that sums do not depend on the number of ranks: that is modelled. "
    "Each fault is a real SIGKILL of it in the middle of a step. It resumes from its last checkpoint, one every "
    "{save_every} steps. {changes} of the {faults} faults change the number of ranks (1, 2 and 4). Loaders that keep a "
    "state per rank give rank r of the new number that of rank r modulo the old one, as none of them documents a change. "
    "What is left of their distance without these changes is in the section with two ranks, which a short run leaves out. "
    "`training_run` of one process is one rank in all its launches: of DLAC, the dataset alone changes the number. "
    "DeepSpeed's own loader has no state, so it starts with the first rows again. A training whose pass ends early begins "
    "another one, until it has had {steps} steps of {batch} rows. Seconds to a loss are its steps at the mean time of a "
    "step of that training, with restarts and repeated steps, while two trainings share the node."
)


def write_page(found: Found, folder: Path) -> None:
    """Write paper.html and paper.pdf into a folder."""
    from matplotlib.backends.backend_pdf import PdfPages

    sections = [*_sections(found)]
    template = jinja2.Template((Path(__file__).with_name("page.html.template")).read_text(), autoescape=True)
    shown = [
        {**section, "text": map(_plain, section["text"]), "image": _inline(section.get("figure"))}
        for section in sections
    ]
    (folder / "paper.html").write_text(template.render(sections=shown))
    with PdfPages(folder / "paper.pdf") as pdf:
        for section in sections:
            for sheet in _sheets(section):
                pdf.savefig(sheet)


def write_docs(found: Found, docs: Path) -> None:
    """Write docs/evidence/paper.md, and its pictures."""
    lines = ["# The paper's experiments", "", *_HEAD, ""]
    for section in _sections(found):
        lines += [f"## {section['title']}", "", *section["text"], ""]
        if "figure" in section:
            name = f"{section['picture']}.png"
            (docs / "pictures" / name).write_bytes(_png(section["figure"]))
            lines += [f"![{section['title']}](pictures/{name})", ""]
        for heads, rows in section["tables"]:
            lines += [_row(heads), "|---" * len(heads) + "|", *map(_row, rows), ""]
    (docs / "paper.md").write_text("\n".join(lines))


_HEAD = (
    "Written by `python -m benchmarks.paper --docs paper.json`. `make paper` measures the machine on which it is called, and",
    "writes one page as HTML and PDF. Each section says what the paper states, what was measured, and",
    "what was modelled.",
)


def _sections(found: Found) -> Iterator[Found]:
    yield {
        "title": "The paper's claims and its tables",
        "text": ["Each claim has a section below, which says how it was measured, on what, and what was modelled."],
        "tables": [
            (CLAIM_HEADS, claim_rows(found)),
            (TABLE_1_HEADS, table_1_rows(found)),
            (TABLE_2_HEADS, table_2_rows(found)),
        ],
    }
    if "outcomes" in found.get("divergence", {}):
        yield from _divergence(found["divergence"])
    elif "divergence" in found:
        failed = f"**It failed:** {found['divergence']['failed']}"
        yield {"title": "Training under faults", "text": [failed], "tables": []}
    for name, program in PROGRAMS.items():
        if name in found:
            yield _program(name, program.title, found[name])
    if modes := modes_of(found):
        yield _month(modes)


def _divergence(part: Found) -> Iterator[Found]:
    outcomes = [Outcome.from_json(each) for each in part["outcomes"]]
    effort = part["effort"]
    changes = sum(before != after for before, after in pairwise(WORLDS[: effort["faults"] + 1]))
    about = _ABOUT.format(**effort, changes=changes, batch=BATCH)
    for number, setting in enumerate(dict.fromkeys(each.setting for each in outcomes)):
        facts = (
            f"**{_SETTINGS[setting]}.** {effort['seeds']} seeds, {effort['faults']} faults at the same steps, a transformer of "
            f"{effort['parameters'] / 1e6:.1f} M parameters, bytes of Python's standard library, measured {_when(part)}."
        )
        summaries, undisturbed = (
            [each for each in of(outcomes, BATCH) if each.setting == setting]
            for of in (summarize, summarize_undisturbed)
        )
        failures = [
            f"{METHODS[each.method].name} failed with {len(each.failed)} of {len(each.failed) + each.seeds} seeds: "
            f"`{each.failed[0]}`"
            for each in summaries
            if each.failed
        ]
        yield {
            "picture": "divergence" if setting == "stream" else f"divergence-{setting}",
            "title": "Training under faults" if number == 0 else f"Training under faults: {_SETTINGS[setting].lower()}",
            "text": [
                'The paper: "training loss curves that track within 0.1% of failure-free runs" (5.2).',
                "",
                facts,
                *(["", about] if number == 0 else []),
                *(line for failure in failures for line in ("", failure)),
            ],
            "figure": _curves(outcomes, setting),
            "tables": [_summary_table(undisturbed, summaries)],
        }


_SUMMARY_HEADS = (
    "resumes with",
    "final validation loss (± 95 %)",
    "its variance",
    "beyond its own undisturbed training (± 95 %)",
    "area between the validation curves, per step",
    "mean distance of its training loss",
    "identical to it, bit by bit",
    "rows repeated",
    "rows missing",
    "worth steps of undisturbed training",
    "seconds to the last loss of its own undisturbed training",
    "steps computed per step",
)


def _summary_table(undisturbed: Sequence[Summary], faulted: Sequence[Summary]) -> Table:
    rows = [_summary_row(each, f"no failure, the order of {METHODS[each.method].name}") for each in undisturbed]
    return _SUMMARY_HEADS, [*rows, *(_summary_row(each, METHODS[each.method].name) for each in faulted)]


def _when(part: Found) -> str:
    """Return a phrase on the day, the commit, the machine and the processes that shared it."""
    before, after = part["load"]
    return (
        f"on {part['day']}, at commit {part['commit']}, in {part['seconds'] / 60:.1f} min, on {part['machine']}, at a load "
        f"average of {before:.1f} before and {after:.1f} after it{', as a short run' if part['quick'] else ''}"
    )


def _summary_row(each: Summary, name: str) -> tuple[str, ...]:
    name += " (failed)" if each.failed else ""
    if not each.seeds:
        return (name, *("-",) * (len(_SUMMARY_HEADS) - 1))
    return (
        name,
        f"{each.final:.4f} ± {_band(each, each.final_band)}",
        f"{each.final_variance:.2g}",
        f"{each.excess:+.4f} ± {_band(each, each.excess_band)}",
        f"{each.area:.4f}",
        f"{100 * each.loss_distance:.2f} %",
        f"{each.identical} of {each.seeds}",
        f"{each.repeated:,.0f} of {each.rows:,}",
        f"{each.missing:,.0f}",
        f"{each.worth:.0f} of {each.rows // BATCH}",
        _reached(each),
        f"{each.computed:.2f}",
    )


def _band(each: Summary, band: float) -> str:
    """Return half of a confidence interval. One seed has none."""
    return f"{band:.4f}" if each.seeds > 1 else "?"


def _reached(each: Summary) -> str:
    """Return the seconds to the undisturbed training's last loss, of the seeds that reached it."""
    if not each.reached:
        return "never within the run"
    seconds = f"{each.reached_s:.0f} s"
    return seconds if each.reached == each.seeds else f"{seconds} ({each.reached} of {each.seeds} seeds)"


def _program(name: str, title: str, part: Found) -> Found:
    program = PROGRAMS[name]
    command = " ".join(("python", *program.command(name)))
    text = [f"The paper: {program.paper}.", "", f"Measured by `{command}` {_when(part)}."]
    if program.about:
        text += ["", f"{program.about}."]
    if program.modelled:
        text += ["", f"Modelled: {program.modelled}."]
    if "failed" in part:
        return {"title": title, "text": [*text, "", f"**It failed:** {part['failed']}"], "tables": []}
    figures = part["figures"]
    section = {"title": title, "text": text, "tables": program_tables(figures, program.sides)}
    if name != "intervals":
        return section
    return {**section, "figure": _risk(figures, program.sides), "picture": "intervals"}


def program_tables(figures: Found, sides: Sequence[str]) -> list[Table]:
    """Return the tables of a program's figures: of those whose names begin or end with a side's name, and of the others.

    The first table has a column for each side.
    """
    cells: dict[str, dict[str, Found]] = {side: {} for side in sides}
    others: list[tuple[str, ...]] = []
    for key, figure in figures.items():
        side = next((side for side in sides if key.startswith(f"{side}_") or key.endswith(f"_{side}")), None)
        if side is None:
            others.append((_words(key), _value(figure), figure["unit"], figure["bar"] or "", _verdict(figure)))
        else:
            begins = key.startswith(f"{side}_")
            cells[side][key.removeprefix(f"{side}_") if begins else key.removesuffix(f"_{side}")] = figure
    tables: list[Table] = [(("figure", "value", "unit", "bar", ""), others)] if others else []
    measured = {side: found for side, found in cells.items() if found}
    if not measured:
        return tables
    units = {key: figure["unit"] for found in measured.values() for key, figure in found.items()}
    heads = ("figure", *map(_words, measured))
    table = [(_head(key, unit), *(_cell(found.get(key)) for found in measured.values())) for key, unit in units.items()]
    return [(heads, table), *tables]


def _words(key: str) -> str:
    return key.replace("_", " ")


def _head(key: str, unit: str) -> str:
    """Return the name of a figure with its unit, once."""
    name = _words(key.removesuffix(f"_{unit}"))
    return name if unit in name.split() else f"{name} ({unit})"


def _value(figure: Found) -> str:
    value = figure["value"]
    return f"{value:,.0f}" if abs(value) >= 100_000 else f"{value:,.6g}"


def _cell(figure: Found | None) -> str:
    """Return a value of three digits, and its bar if it has one."""
    if figure is None:
        return ""
    value = figure["value"]
    shown = f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return shown if figure["bar"] is None else f"{shown} ({figure['bar']}: {_verdict(figure)})"


def _month(modes: Sequence[Mode]) -> Found:
    heads = (
        "survives by",
        "",
        "restart",
        "at risk",
        "overhead",
        *(f"goodput, starting in {start:.0f} s" for start in STARTS_S),
    )
    rows = [
        (
            mode.name,
            mode.about,
            f"{mode.restart_s:.1f} s",
            f"{mode.at_risk_s:.0f} s",
            f"{100 * mode.overhead:.1f} %",
            *(_share(simulate(mode, start_s=start)) for start in STARTS_S),
        )
        for mode in modes
    ]
    text = [
        "The paper has no figure of it.",
        "",
        f"Modelled: {MONTHS:,} months with interruptions at random times, {INTERRUPTIONS} in {DAYS} days, as Llama 3 405B had on "
        "16,384 GPUs. Each costs the restart, half of the work at risk on average, and the time that a job of that "
        "size needs to start its processes and communicators, which is assumed. Ranges hold 90 % of the months.",
    ]
    return {"title": "Goodput over a month", "text": text, "tables": [(heads, rows)]}


def _share(found: Goodput) -> str:
    return f"{100 * found.mean:.2f} % ({100 * found.low:.2f} to {100 * found.high:.2f})"


def _verdict(figure: Found) -> str:
    return "" if figure["bar"] is None else "holds" if figure["holds"] else "missed"


def _curves(outcomes: Sequence[Outcome], setting: str) -> Figure:
    """Draw training and validation losses with their bands, and how far the latter are from the undisturbed ones."""
    from matplotlib.figure import Figure as Drawing

    figure = Drawing(figsize=(14, 4.2), layout="constrained")
    trained, losses, beyond = figure.subplots(1, 3)
    undisturbed = [*calm_of(outcomes, setting, "dlac").values()]
    _draw(trained, "undisturbed, in DLAC's order", "calm", [_smoothed(each.losses) for each in undisturbed])
    _draw(losses, "undisturbed, in DLAC's order", "calm", [each.validation for each in undisturbed])
    for key, method in METHODS.items():
        calm = calm_of(outcomes, setting, key)
        under_faults = (each for each in outcomes if (each.setting, each.method, each.faulted) == (setting, key, True))
        faulted = [each for each in under_faults if each.seed in calm and not each.failed]
        if not faulted:
            continue
        _draw(trained, method.name, key, [_smoothed(each.losses) for each in faulted])
        _draw(losses, method.name, key, [each.validation for each in faulted])
        _draw(
            beyond,
            method.name,
            key,
            [
                {step: loss - calm[each.seed].validation[step] for step, loss in each.validation.items()}
                for each in faulted
            ],
        )
    trained.set_ylabel(f"training loss, mean of {_WINDOW} steps (nats per byte)")
    losses.set_ylabel("validation loss (nats per byte)")
    beyond.set_ylabel("validation loss beyond its own undisturbed training")
    for axes in (trained, losses, beyond):
        axes.set_xlabel("optimizer step")
        axes.spines[["top", "right"]].set_visible(False)
    losses.legend(frameon=False, fontsize=8)
    return figure


def _smoothed(losses: dict[int, float]) -> dict[int, float]:
    """Return the mean of each window of steps, at its last step."""
    steps = sorted(losses)
    windows = (steps[first : first + _WINDOW] for first in range(0, len(steps) - _WINDOW + 1, _WINDOW))
    return {window[-1]: float(np.mean([losses[step] for step in window])) for window in windows}


def _risk(figures: Found, rows: Sequence[str]) -> Figure:
    """Draw overhead and work at risk of each checkpoint interval, with the paper's bounds."""
    from matplotlib.figure import Figure as Drawing

    figure = Drawing(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots()
    for modelled, label, filled in (
        (False, "measured", _COLORS["dlac"]),
        (True, "modelled from the cost of a checkpoint", "none"),
    ):
        shown = [row for row in rows if row.startswith("modelled") == modelled and f"{row}_overhead" in figures]
        at_risk, overhead = ([figures[f"{row}_{name}"]["value"] for row in shown] for name in ("at_risk_s", "overhead"))
        axes.scatter(at_risk, overhead, s=60, facecolors=filled, edgecolors=_COLORS["dlac"], label=label, zorder=3)
        for row, seconds, percent in zip(shown, at_risk, overhead, strict=True):
            interval = (
                f"every {row.removeprefix('modelled_').removesuffix('s')} s" if row[-1] == "s" else "DLAC's choice"
            )
            axes.annotate(interval, (seconds, percent), xytext=(8, 6), textcoords="offset points", fontsize=9)
    axes.axhline(2, color=_COLORS["restart"], linewidth=1, linestyle="--", label="the paper: below 2 %, below 30 s")
    axes.axvline(30, color=_COLORS["restart"], linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_xticks([10, 30, 60, 300], ["10", "30", "60", "300"])
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_xlabel("work at risk: longest time from a state to the next commit (s)")
    axes.set_ylabel("overhead (% of the time)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _draw(axes: Axes, label: str, key: str, curves: Sequence[dict[int, float]]) -> None:
    """Draw the mean of curves, if there are any, and its 95 % confidence interval."""
    if not curves:
        return
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[step] for step in steps] for curve in curves])
    mean = values.mean(axis=0)
    band = np.array([band_of(list(column)) for column in values.T])
    wide = key in ("calm", "dlac")
    axes.plot(steps, mean, color=_COLORS[key], label=label, linewidth=4 if key == "calm" else 2 if wide else 1.3)
    axes.fill_between(steps, mean - band, mean + band, color=_COLORS[key], alpha=0.15, linewidth=0)


def _sheets(section: Found) -> Iterator[Figure]:
    """Yield the pages of a section for the PDF: its text with its picture, and each table."""
    from matplotlib.figure import Figure as Drawing

    lines = [each for line in section["text"] for each in textwrap.wrap(_plain(line), 135) or [""]]
    sheet = Drawing(figsize=(11, 1.2 + 0.22 * len(lines)))
    sheet.text(0.04, 1 - 0.5 / sheet.get_figheight(), section["title"], fontsize=14, fontweight="bold")
    sheet.text(0.04, 1 - 0.8 / sheet.get_figheight(), "\n".join(lines), fontsize=9, verticalalignment="top")
    yield sheet
    if "figure" in section:
        yield section["figure"]
    for heads, rows in section["tables"]:
        folded = [tuple(textwrap.fill(cell, _CELL_CHARACTERS) for cell in row) for row in rows]
        for first in range(0, len(rows), 24):
            yield _sheet_of_table(heads, folded[first : first + 24])


def _sheet_of_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Figure:
    from matplotlib.figure import Figure as Drawing

    lines = [1 + max(cell.count("\n") for cell in row) for row in rows]
    sheet = Drawing(figsize=(13, 1.8 + 0.2 * sum(lines)), layout="constrained")
    axes = sheet.subplots()
    axes.axis("off")
    table = axes.table(cellText=rows, colLabels=[_folded(head) for head in heads], loc="upper left", cellLoc="left")
    table.auto_set_font_size(False)
    table.set_fontsize(6.5)
    table.auto_set_column_width(list(range(len(heads))))
    for column in range(len(heads)):
        height = table[0, column].get_height()
        table[0, column].set_height(height * 2.6)
        for number, count in enumerate(lines, start=1):
            table[number, column].set_height(height * count)
    return sheet


def _plain(text: str) -> str:
    """Return a line of Markdown without its marks."""
    return text.replace("**", "").replace("`", "")


def _folded(head: str) -> str:
    words, lines = head.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 16:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=140)
    return file.getvalue()


def _inline(figure: Figure | None) -> str:
    return "" if figure is None else f"data:image/png;base64,{base64.b64encode(_png(figure)).decode()}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
