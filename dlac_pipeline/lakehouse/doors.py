"""Doors of the core: entry point groups through which extensions enter. The core imports no extension by its module's name.

An extension of this distribution and one of another distribution are registered in the same way, in `pyproject.toml`:

    [project.entry-points."dlac.launchers"]
    slurm = "dlac_pipeline.extensions.clusters.cluster_job:slurm_job"
    kubernetes = "dlac_pipeline.extensions.clusters.cluster_job:kubernetes_job [cluster]"

The word in brackets is the extra of the distribution that installs the packages which the extension imports.
"""

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dlac_pipeline.lakehouse.errors import BadInput


@dataclass(frozen=True, slots=True)
class Door:
    """An entry point group. Nothing is imported before `load`."""

    group: str
    """Name of the group: "dlac.launchers"."""
    noun: str
    """Kind of the entries in messages: "launcher"."""

    def points(self) -> dict[str, EntryPoint]:
        """Return the name of each installed entry -> its entry point, sorted by name."""
        found = entry_points(group=self.group)
        return {point.name: point for point in sorted(found, key=lambda point: (point.name, point.value))}

    def find(self, name: str, *, setting: str, others: tuple[str, ...] = ()) -> EntryPoint:
        """Return the entry point of a name that `setting` has. `others`: names that the core knows itself.

        Raise `BadInput` if no entry has the name, or two distributions have one.
        """
        points: list[EntryPoint] = [*entry_points(group=self.group, name=name)]
        named = {(point.value, point.dist and point.dist.name) for point in points}
        if len(named) > 1:
            values = sorted(value for value, _ in named)
            raise BadInput(f"expected one {self.noun} {name!r}, found {values!r}: uninstall one of their distributions")
        if points:
            return points[0]
        known = sorted({*others, *self.points()})
        close = get_close_matches(name, known, n=1)
        meant = f"did you mean {close[0]!r}? Installed are" if close else "installed are"
        raise BadInput(
            f"expected an installed {self.noun} in {setting}, found {name!r}: {meant} {', '.join(known) or 'none'}"
        )

    def load(self, name: str, *, setting: str, others: tuple[str, ...] = ()) -> Any:
        """Import the entry of a name that `setting` has, and return it.

        Raise `BadInput` as `find` does, and if the entry cannot be imported: a package is missing or too old, or it raises.
        """
        return self._import(self.find(name, setting=setting, others=others), setting)

    def load_all(self) -> dict[str, Any]:
        """Import all entries by name, once for each search path. Raise `BadInput` if one cannot be imported."""
        return _load_all(self, tuple(sys.path))

    def _import(self, point: EntryPoint, setting: str) -> Any:
        try:
            return point.load()
        except Exception as err:  # whatever a module of others raises
            kind = "" if isinstance(err, ImportError | AttributeError) else f"{type(err).__name__}: "
            raise BadInput(
                f"expected {setting} = {point.name!r} to load, found {kind}{err}: {install_command(point)}"
            ) from err


@cache
def _load_all(door: Door, path: tuple[str, ...]) -> dict[str, Any]:
    return {name: door._import(point, f"the {door.noun}") for name, point in door.points().items()}


def install_command(point: EntryPoint) -> str:
    """Return the command that installs an entry with the packages that it imports."""
    extras = f"[{','.join(point.extras)}]" if point.extras else ""
    return f'pip install "{point.dist.name if point.dist else point.module}{extras}"'
