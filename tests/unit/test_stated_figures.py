"""Figures in README and docs equal results: programs measured them, and a page or a test can be made of them again."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.paper import figures_of
from benchmarks.paper_parts.month import figures_of_month
from benchmarks.paper_parts.page import write_docs
from benchmarks.paper_parts.programs import PROGRAMS
from benchmarks.results.page import PAGE, page
from benchmarks.results.record import MEASURED
from benchmarks.soak_faults.page import faults_of, page_of

_ROOT = Path(__file__).parents[2]
_EVIDENCE = _ROOT / "docs" / "evidence"
"""Pages that programs write. The result of gpu.md is not kept: a machine with an accelerator is lent for minutes."""
_SETTINGS = Path(__file__).with_name("stated_settings.toml")
"""Numbers with a unit that are no measured figures: settings, limits, and what an example prints."""
_NUMBER = re.compile(
    r"(?<![\w.,^])(\d[\d,]*(?:\.\d+)?)\s?(%|us|ms|s|seconds?|min|minutes?|hours?|days?|bytes|KB|MB|GB|TB|KiB|MiB|GiB|nats|times|x|rows|steps)(?!\w)"
)
_CODE = re.compile(r"```.*?```|`[^`\n]*`|^(?: {4}|\t)[^\n]*$", re.DOTALL | re.MULTILINE)


def _find_numbers(text: str) -> Iterator[tuple[str, str]]:
    """Yield numbers of a text outside its code, and their units."""
    yield from _NUMBER.findall(_CODE.sub("", text))


def _results() -> dict[str, set[float]]:
    """Return what programs measured, by unit. A share is a percentage as well, a ratio times, and seconds milliseconds."""
    found: dict[str, set[float]] = {}
    for file in MEASURED.glob("*.json"):
        for figure in json.loads(file.read_text()).get("figures", {}).values():
            value, unit = figure["value"], figure["unit"]
            found.setdefault(unit, set()).add(value)
            if unit in ("ratio", "x"):
                found.setdefault("times", set()).add(value)
            elif unit.startswith(("share", "of ")):
                found.setdefault("%", set()).add(100 * value)
            elif unit == "s":
                found.setdefault("ms", set()).add(1e3 * value)
    return found


def _is_measured(number: str, unit: str, results: dict[str, set[float]]) -> bool:
    digits = len(number.partition(".")[2])
    return any(round(value, digits) == float(number.replace(",", "")) for value in results.get(unit, ()))


def _pages() -> list[Path]:
    return [
        _ROOT / "README.md",
        *(page for folder in ("", "recovery", "extensions") for page in sorted((_ROOT / "docs" / folder).glob("*.md"))),
    ]


def test_pages_state_only_measured_figures() -> None:
    """A number with a unit is in a result, or in the list of settings."""
    settings: dict[str, list[str]] = tomllib.loads(_SETTINGS.read_text())
    results = _results()
    unknown = []
    for file in _pages():
        name = str(file.relative_to(_ROOT))
        for number, unit in _find_numbers(file.read_text()):
            text = f"{number} {unit}"
            if text not in settings.get(name, ()) and not _is_measured(number, unit, results):
                unknown.append(f"{name}: {text}")
    assert not unknown, (
        f"expected each figure to be in a result in {MEASURED}, found others: {'; '.join(unknown)}. Keep the result of the "
        f"program with `python -m benchmarks.results.record`, or add a setting to {_SETTINGS}"
    )


def test_settings_are_those_of_the_pages() -> None:
    """The list has no number that its page does not state any more."""
    stated = {
        str(file.relative_to(_ROOT)): {f"{number} {unit}" for number, unit in _find_numbers(file.read_text())}
        for file in _pages()
    }
    settings: dict[str, list[str]] = tomllib.loads(_SETTINGS.read_text())
    left = {name: sorted(set(texts) - stated.get(name, set())) for name, texts in settings.items()}
    assert left == {name: [] for name in settings}


def test_page_of_figures_is_made_of_results() -> None:
    """Run `make docs` after a result or a section has changed."""
    assert PAGE.read_text() == page()


def test_paper_proves_exact_resumes() -> None:
    """The kept result of `make paper` is whole and meets its bars. DLAC equals the undisturbed training in all seeds."""
    found = json.loads((MEASURED / "paper.json").read_text())
    effort = found["divergence"]["effort"]
    assert (effort["seeds"], effort["faults"], len(effort["settings"])) == (5, 20, 3)
    assert not found["divergence"]["quick"]
    figures = {**figures_of(found), **figures_of_month(found)}
    assert {name for name, figure in figures.items() if not figure.holds} == set()
    identical = {
        name: figure.value for name, figure in figures.items() if name.endswith("_identical") and "_dlac" in name
    }
    assert {name.partition("_")[0] for name in identical} == {"stream", "passes", "fixed"}
    assert set(identical.values()) == {5}
    assert [name for name in PROGRAMS if "figures" not in found.get(name, {})] == []


@pytest.mark.slow
def test_paper_is_made_of_its_result(tmp_path: Path) -> None:
    """Run `--docs` of their programs after a result or the form of a page has changed."""
    (tmp_path / "pictures").mkdir()
    write_docs(json.loads((MEASURED / "paper.json").read_text()), tmp_path)
    assert (tmp_path / "paper.md").read_text() == (_EVIDENCE / "paper.md").read_text()


def test_soak_is_made_of_its_result() -> None:
    """Run `python -m benchmarks.soak --docs benchmarks/results/measured/soak.json` after a change of the page's form."""
    campaign = json.loads((MEASURED / "soak.json").read_text())
    assert (page_of(campaign), faults_of(campaign)) == (
        (_EVIDENCE / "soak.md").read_text(),
        (_EVIDENCE / "soak.json").read_text(),
    )
