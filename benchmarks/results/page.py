"""Page of all figures, docs/evidence/figures.md: `python -m benchmarks.results.page`. In: measured/*.json and sections/.

A section is a Jinja template. `result("NAME")` reads measured/NAME.json. Of a result `r`, `r.about` says when and on what it was
measured, `r("FIGURE")` is a figure with its unit, `r.number("FIGURE")` without, `r.share("FIGURE")` a share as a percentage,
`r.bar("FIGURE")` its bar and whether it holds, `r.judged("FIGURE")` the number, bold if it misses its bar, and
`r.has("FIGURE")` whether there is one. missed.toml has the reason of each missed bar.
"""

import json
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.results.record import MEASURED

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "figures.md"
_SECTIONS = Path(__file__).with_name("sections")
REASONS = Path(__file__).with_name("missed.toml")


class Result:
    """The result of one call of a program."""

    def __init__(self, name: str) -> None:
        file = MEASURED / f"{name}.json"
        if not file.exists():
            raise FileNotFoundError(
                f"expected {file}: run `python -m benchmarks.results.record --name {name} PROGRAM ...` once"
            )
        self._found: dict[str, Any] = json.loads(file.read_text())
        self._name = name

    @property
    def about(self) -> str:
        """The sentence on day, machine, commit and load."""
        found = self._found
        command = " ".join(["python -m", f"benchmarks.{found['program']}", *found["arguments"]])
        return (
            f"Measured by `{command}` on {found['day']}, at commit {found['commit']}, {_load_of(found['load'])}on "
            f"{found['machine']}."
        )

    def has(self, figure: str) -> bool:
        """Return whether the program reported a figure: a short run may have fewer."""
        return figure in self._found["figures"]

    def __call__(self, figure: str) -> str:
        """Return a figure with its unit."""
        value, unit = (self._figure(figure)[key] for key in ("value", "unit"))
        if unit == "s" and 0 < abs(value) < 0.1:
            value, unit = 1e3 * value, "ms"
        return format_number(value) if unit == "ratio" else f"{format_number(value)} {unit}"

    def number(self, figure: str) -> str:
        """Return a figure without its unit."""
        return format_number(self._figure(figure)["value"])

    def share(self, figure: str) -> str:
        """Return a share as a percentage."""
        return f"{format_number(100 * self._figure(figure)['value'])} %"

    def bar(self, figure: str) -> str:
        """Return the bar of a figure, and whether it holds."""
        found = self._figure(figure)
        if found["bar"] is None:
            return ""
        return f"{found['bar']}: {'holds' if found['holds'] else '**missed**'}"

    def judged(self, figure: str) -> str:
        """Return a figure without its unit, in bold type if it misses its bar."""
        return self.number(figure) if self._figure(figure)["holds"] else f"**{self.number(figure)}**"

    def _figure(self, name: str) -> dict[str, Any]:
        figures: dict[str, dict[str, Any]] = self._found["figures"]
        if name not in figures:
            raise KeyError(f"expected a figure of {self._name}, found {name!r}; it has {', '.join(figures)}")
        return figures[name]


def _load_of(load: list[float] | float | None) -> str:
    """Return a phrase on the load average before and after the program, or on the one that it printed."""
    if load is None:
        return ""
    if isinstance(load, float):
        return f"with a load average of {load:.1f}, "
    return f"with a load average of {load[0]:.1f} before and {load[1]:.1f} after it, "


def format_number(value: float) -> str:
    """Return a number with three digits, or a whole one if it has more."""
    return f"{round(value):,}" if value == int(value) or abs(value) >= 100 else f"{float(f'{value:.3g}'):g}"


def page() -> str:
    """Return the text of the page."""
    return f"{_render('page', section=_section, missed=missed(), short=short()).rstrip()}\n"


def missed() -> list[dict[str, str]]:
    """Return the kept figures that miss their bars, with their values, as one row for each reason.

    Raises:
        LookupError: a missed bar has no reason, or a reason has no missed bar.
    """
    reasons: dict[str, dict[str, str]] = tomllib.loads(REASONS.read_text())
    rows = {(name, pattern): list[str]() for name, patterns in reasons.items() for pattern in patterns}
    for name, kept in _kept():
        for figure, found in kept["figures"].items():
            if found.get("holds", True):
                continue
            pattern = next((each for each in reasons.get(name, ()) if fnmatch(figure, each)), None)
            if pattern is None:
                raise LookupError(
                    f"expected a reason in {REASONS.name} why {figure} of {name} misses its bar, found none"
                )
            rows[name, pattern].append(f"{figure} {format_number(found['value'])} ({found['bar']})")
    if unused := [key for key, figures in rows.items() if not figures]:
        raise LookupError(f"expected reasons in {REASONS.name} of missed bars only, found {unused}: delete them")
    return [
        {"result": name, "figures": ", ".join(figures), "reason": reasons[name][pattern]}
        for (name, pattern), figures in rows.items()
    ]


def short() -> list[str]:
    """Return the results that come from a short run of their program."""
    return [name for name, kept in _kept() if "--quick" in kept["arguments"]]


def _kept() -> list[tuple[str, dict[str, Any]]]:
    """Return the results of `benchmarks.results.record`, by name."""
    found = ((file.stem, json.loads(file.read_text())) for file in sorted(MEASURED.glob("*.json")))
    return [(name, kept) for name, kept in found if "arguments" in kept]


def _section(name: str) -> str:
    return f"{_render(name, result=Result).strip()}\n"


def _render(template: str, **names: Any) -> str:
    loader = jinja2.FileSystemLoader(_SECTIONS)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.get_template(f"{template}.md").render(**names)


if __name__ == "__main__":
    PAGE.write_text(page())
