"""The one form in which a benchmark speaks: figures with units and bars, as one JSON object on the last line."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured value; `bar` says what must hold (such as "<= 0.1"), None when it is only stated."""

    value: float
    unit: str
    bar: str | None = None

    @property
    def holds(self) -> bool:
        """Whether the value is on the right side of its bar."""
        if self.bar is None:
            return True
        relation, limit = self.bar.split()
        return self.value <= float(limit) if relation == "<=" else self.value >= float(limit)


def report(benchmark: str, figures: dict[str, Figure]) -> None:
    """Print the closing line."""
    shown = {
        name: {"value": round(figure.value, 6), "unit": figure.unit, "bar": figure.bar, "holds": figure.holds}
        for name, figure in figures.items()
    }
    print(json.dumps({"benchmark": benchmark, "figures": shown}), flush=True)
