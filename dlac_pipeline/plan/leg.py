"""A leg: everything that determines the order of a stretch of a run, as one record that resuming is checked against."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from catalog.errors import FormatTooNew, ResumeMismatch
from catalog.schemas import FORMAT_VERSION
from dlac_pipeline.plan.cut import ORDER_VERSION, OrderSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """What a leg binds. `format_version` is that of this record."""

    index: int
    start_step: int
    plan_id: str
    source_table: str
    table_uuid: str
    snapshot_id: int
    schema_id: int
    columns: tuple[str, ...]
    row_filter: str
    seed: int
    key_groups: int
    batch_size: int
    block_slices: int
    shuffle: bool
    passes: int
    """Decides where the last batch has empty slots."""
    order_version: int = ORDER_VERSION
    format_version: int = FORMAT_VERSION

    @property
    def order_settings(self) -> OrderSettings:
        """The part that the order is computed from."""
        return OrderSettings(
            seed=self.seed,
            key_groups=self.key_groups,
            batch_size=self.batch_size,
            block_slices=self.block_slices,
            shuffle=self.shuffle,
            version=self.order_version,
        )

    def to_json(self) -> str:
        """This leg as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Leg:
        """The leg in `text`.

        Raises:
            FormatTooNew: a newer DLAC wrote it.
        """
        raw: dict[str, Any] = json.loads(text)
        for name, known in (("format_version", FORMAT_VERSION), ("order_version", ORDER_VERSION)):
            if raw[name] > known:
                raise FormatTooNew(f"the leg has {name} {raw[name]}, this DLAC reads up to {known}: upgrade DLAC")
        return cls(**{**raw, "columns": tuple(raw["columns"])})

    def check_same(self, wanted: Leg) -> None:
        """Check that `wanted`, made from the job spec, binds what this committed leg binds.

        Raises:
            ResumeMismatch: it does not; names each difference.
        """
        mine, theirs = asdict(self), asdict(wanted)
        differing = [name for name in mine if name not in ("index", "start_step") and mine[name] != theirs[name]]
        if differing:
            lines = "\n".join(f"  {name}: committed {mine[name]!r}, asked for {theirs[name]!r}" for name in differing)
            raise ResumeMismatch(
                f"resuming would change what leg {self.index} of this run binds:\n{lines}\n"
                "give the committed values again, or start a run under another name"
            )

    def warnings(self, live_rows: int, world_size: int) -> list[str]:
        """What is allowed but surely not meant, or costs more than it needs to."""
        said = []
        if live_rows < self.batch_size:
            said.append(
                f"the plan has {live_rows} live rows, fewer than the batch size {self.batch_size}: "
                + ("a batch repeats rows of the pass before" if self.passes > 1 else "the only batch has empty slots")
            )
        if self.key_groups % world_size:
            said.append(
                f"{world_size} ranks do not divide the {self.key_groups} key groups: ranks share key groups, and decode their "
                "blocks once each; choose a number of ranks that divides key_groups"
            )
        return said
