"""From seconds to recover, by side, to figures compared with the bare relaunch."""

import os
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.figures import Figure


def compare_with_bare(measured: Mapping[str, Sequence[float]], side: str, *, most: float) -> dict[str, Figure]:
    """Return medians and worst of all sides, and the ratio (at most `most`) and difference of `side` to the side "bare"."""
    if not measured["bare"]:
        raise SystemExit("expected the bare side to recover at least once, found no recovery: run the program again")
    medians = {name: statistics.median(found) for name, found in measured.items()}
    figures = {f"{name}_recovery_s": Figure(value=value, unit="s") for name, value in medians.items()}
    figures |= {f"{name}_recovery_worst_s": Figure(value=max(found), unit="s") for name, found in measured.items()}
    if len(measured["bare"]) > 1:
        halves = [statistics.median(measured["bare"][part::2]) for part in (0, 1)]
        figures["bare_over_bare"] = Figure(value=halves[1] / halves[0], unit="ratio")
    return figures | {
        "kills": Figure(value=len(measured[side]), unit="per side"),
        f"{side}_over_bare": Figure(value=medians[side] / medians["bare"], unit="ratio", bar=f"<= {most}"),
        f"{side}_less_bare_s": Figure(value=medians[side] - medians["bare"], unit="s"),
        "load_average_1min": Figure(value=os.getloadavg()[0], unit="processes"),
    }
