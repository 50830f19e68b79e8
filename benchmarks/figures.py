"""The common output of benchmarks: figures with units and bars, as one JSON object on the last line."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured value. `bar` is its condition (such as "<= 0.1"), or None if the value is only stated."""

    value: float
    unit: str
    bar: str | None = None

    @property
    def holds(self) -> bool:
        """Return whether the value meets its bar."""
        if self.bar is None:
            return True
        relation, limit = self.bar.split()
        return self.value <= float(limit) if relation == "<=" else self.value >= float(limit)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"value": float(f"{self.value:.9g}"), "unit": self.unit, "bar": self.bar, "holds": self.holds}


def report(benchmark: str, figures: dict[str, Figure], **about: str) -> None:
    """Print the last line. `about` names the measured variant, if there are several."""
    shown = {name: figure.to_json() for name, figure in figures.items()}
    print(json.dumps({"benchmark": benchmark, **about, "figures": shown}), flush=True)
