"""Pictures of a run, as PNG files in memory: its losses, consumed row groups, cost of checkpoints, and time by cause."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np

from dlac_pipeline.audit.lakehouse_sql import rows_of, sql_script
from dlac_pipeline.audit.wording import format_bytes, format_duration
from dlac_pipeline.extensions.look.goodput import read_attempt_times, read_goodput
from dlac_pipeline.extensions.look.losses import LossCurve
from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = (("#9db8d9", 5.0), ("#16335b", 1.2))
"""Color and width of each curve: a wide one below, so that a narrow one on it shows where they agree."""
_TIMES = (("hours", 3600), ("minutes", 60), ("seconds", 1))
_MARK, _AGAIN, _NOTHING = "#c8553d", "#c8553d", "#e4e4e4"
_NAMED_FILES = 24
_PHASES = {"copy": "#9db8d9", "write": "#3f6fae", "seal": "#16335b", "vote": "#d9a441"}
_CAUSES = {
    "trained": "#16335b",
    "checkpointing": "#3f6fae",
    "startup": "#9db8d9",
    "down": "#c8553d",
    "replayed": "#d9a441",
    "abandoned": "#efd9a7",
    "unknown": "#bdbdbd",
}
"""Cause of the time of an attempt -> its color. Idle time is left out."""


def draw_losses(curves: Sequence[LossCurve]) -> bytes:
    """Draw one or two loss curves over each other. The last one has the marks."""
    figure = _figure(9.0, 3.6)
    axes = figure.add_subplot()
    for curve, (color, width) in zip(curves, _LINES[-len(curves) :], strict=True):
        steps = sorted(curve.losses)
        axes.plot(steps, [curve.losses[step] for step in steps], color=color, linewidth=width, label=curve.run)
    last = curves[-1]
    at_checkpoints = [last.losses.get(step, float("nan")) for step in last.checkpoint_steps]
    dots: dict[str, Any] = {"color": "white", "markeredgecolor": "#16335b", "markersize": 4, "label": "checkpoint"}
    axes.plot(last.checkpoint_steps, at_checkpoints, "o", **dots)
    _mark_recoveries(axes, last)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def draw_coverage(connection: duckdb.DuckDBPyConnection, run: str) -> bytes:
    """The coverage map of a run, from an audit connection: a row per data file, a column per row group."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    rows = rows_of(connection, sql_script("covered_units"), [run])
    files = sorted({row["file_path"] for row in rows})
    part = _coverage_of(rows, files)
    figure = _figure(9.0, min(8.0, 1.6 + 0.28 * max(1, len(files))))
    axes = figure.add_subplot()
    scale = LinearSegmentedColormap.from_list("consumed", ["#ffffff", "#16335b"])
    colors = scale.with_extremes(over=_AGAIN, bad=_NOTHING)
    image = axes.imshow(part, cmap=colors, vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="consumed part", extend="max", fraction=0.04)
    axes.set_xlabel("row group")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("data file")
    axes.set_title("red: some rows twice; gray: no live rows", loc="left", fontsize=8)
    if len(files) <= _NAMED_FILES:
        names = [path.rsplit("/", 1)[-1] for path in files]
        labels = [name if len(name) <= 16 else f"…{name[-15:]}" for name in names]
        axes.set_yticks(range(len(files)), labels, fontsize=7, parse_math=False)
    return _png(figure)


def draw_costs(connection: duckdb.DuckDBPyConnection, run: str) -> bytes:
    """Seconds of each checkpoint by phase, up to its commit, and how long training waited for it, from an audit connection."""
    rows = rows_of(connection, sql_script("phase_costs"), [run])
    figure = _figure(9.0, 3.2)
    axes = figure.add_subplot()
    places, floor = np.arange(len(rows)), np.zeros(len(rows))
    for phase, color in _PHASES.items():
        seconds = np.array([row[phase] for row in rows])
        axes.bar(places, seconds, bottom=floor, color=color, label=phase)
        floor = floor + seconds
    axes.plot(places, [row["stall"] for row in rows], "_", color=_MARK, markersize=12, label="training waited")
    shown = places[:: max(1, len(rows) // 12)]
    axes.set_xticks(shown, [str(rows[place]["step"]) for place in shown])
    axes.set_xlabel("checkpoint, by its step")
    axes.set_ylabel("seconds until the commit")  # which writes these very rows
    axes.spines[["top", "right"]].set_visible(False)
    size = format_bytes(int(np.mean([row["bytes"] or 0 for row in rows]))) if rows else "0 bytes"
    axes.set_title(f"{len(rows)} checkpoints of {size} on average", loc="left", fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    return _png(figure)


def draw_goodput(connection: duckdb.DuckDBPyConnection, run: str) -> bytes:
    """Draw the time of each attempt of a run by cause, from an audit connection."""
    attempts, goodput = read_attempt_times(connection, run), read_goodput(connection, run)
    longest_s = max((sum(row[f"{cause}_s"] for cause in _CAUSES) for row in attempts), default=0.0)
    unit, unit_s = next(each for each in _TIMES if longest_s >= each[1] or each[1] == 1)
    figure = _figure(9.0, 3.2)
    axes = figure.add_subplot()
    places, floor = np.arange(len(attempts)), np.zeros(len(attempts))
    for cause, color in _CAUSES.items():
        spent = np.array([row[f"{cause}_s"] for row in attempts]) / unit_s
        if spent.any():
            axes.bar(places, spent, bottom=floor, color=color, label=cause)
            floor = floor + spent
    shown = places[:: max(1, len(attempts) // 12)]
    axes.set_xticks(shown, [str(attempts[place]["attempt"]) for place in shown])
    axes.set_xlabel("attempt")
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    ratio = None if goodput is None else goodput["ettr"]
    axes.set_title("" if ratio is None else f"effective training time {ratio:.1%}", loc="left", fontsize=8)
    if floor.any():
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _png(figure)


def _coverage_of(rows: list[dict[str, Any]], files: list[str]) -> Any:
    """Consumed part per (file, row group): 0 to 1, 2 where a row was repeated, NaN where nothing was planned."""
    index = {path: number for number, path in enumerate(files)}
    part = np.full((max(1, len(files)), 1 + max((row["row_group"] for row in rows), default=0)), np.nan)
    for row in rows:
        if row["live_rows"]:
            consumed = row["rows_consumed"] / row["live_rows"]
            part[index[row["file_path"]], row["row_group"]] = 2.0 if row["rows_repeated"] else consumed
    return np.ma.masked_invalid(part)


def _mark_recoveries(axes: "Axes", curve: LossCurve) -> None:
    for number, recovery in enumerate(each for each in curve.recoveries if each["outcome"] == "resumed"):
        step, took = recovery["resumed_step"], format_duration(Recovery(**recovery).recovered_s)
        label = "recovery" if number == 0 else None
        axes.axvline(step, color=_MARK, linestyle="--", linewidth=1.2, label=label)
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (3, -8)}
        axes.annotate(took, (step, 1.0), **place, textcoords="offset points", color=_MARK, fontsize=7)


def _figure(width_inches: float, height_inches: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise BadInput(
            "expected matplotlib for the pictures, found none: pip install 'dlac-pipeline[dagster]'"
        ) from err
    return Figure(figsize=(width_inches, height_inches), dpi=130, layout="constrained")


def _png(figure: "Figure") -> bytes:
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name with dollar signs is no formula
    out = io.BytesIO()
    figure.savefig(out, format="png")  # by Agg: no display, no global state, safe in threads
    return out.getvalue()
