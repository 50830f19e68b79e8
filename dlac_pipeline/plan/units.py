"""Work units of a plan as columns. The order is computed from them, without a Python object per unit."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTable:
    """Columns with an entry per work unit, in plan order (file path, row group)."""

    file_paths: list[str]
    file: Ints
    """Index into `file_paths`."""
    row_group: Ints
    first_row: Ints
    """Position in the file of the unit's first row."""
    rows: Ints
    dead: Mapping[int, Ints] = field(default_factory=dict)
    """Unit -> sorted offsets of its dead rows. Absent: all rows live."""
    bytes: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def live_rows(self) -> Ints:
        """Live rows per unit, int64 [units]."""
        live = self.rows.copy()
        for unit, offsets in self.dead.items():
            live[unit] -= len(offsets)
        return live

    def place(self, unit: int) -> tuple[str, int]:
        """Data file and row group of one unit."""
        return self.file_paths[int(self.file[unit])], int(self.row_group[unit])

    def places(self) -> list[tuple[str, int]]:
        """Data file and row group of each unit."""
        files = [self.file_paths[file] for file in self.file.tolist()]
        return list(zip(files, self.row_group.tolist(), strict=True))

    def dead_rows(self, unit: int) -> int:
        """Dead rows of one unit."""
        return len(self.dead[unit]) if unit in self.dead else 0

    def live_offsets(self, unit: int) -> Ints:
        """Sorted offsets of the live rows of one unit, int64 [live rows]."""
        mask = np.ones(int(self.rows[unit]), dtype=np.bool_)
        if unit in self.dead:
            mask[self.dead[unit]] = False
        return np.flatnonzero(mask)
