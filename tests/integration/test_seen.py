"""Who has seen a document: the keys of rows against what was in the tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dlac_pipeline.audit.lakehouse_sql import open_audit
from tests.integration.audit_runs import KINDS, TABLES, Workshop, tokens_of

_SEEN = """
SELECT r.row_id, s.checkpoint_id, s.whole, s.survives, s.applied
FROM (SELECT row_id, row_key(salt, identity, [row_id::VARCHAR]) AS key
    FROM (SELECT DISTINCT row_id FROM source_rows), (SELECT DISTINCT salt, identity FROM keyed_files)) AS r
JOIN seen_by(r.key) AS s ON true
WHERE s.run = $run
"""


class KeyedWorkshop(Workshop):
    """A workshop whose runs record keys of their rows."""

    def train(self, spec: dict[str, Any], **more: Any) -> None:
        """Train with keys of `row_id` for each source."""
        keyed = {"row_keys": True, "identity_columns": ["row_id"]}
        mixture = [{**source, **keyed} for source in spec.get("mixture", [])]
        super().train({**spec, "source": {**spec["source"], **keyed}, "mixture": mixture}, **more)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> KeyedWorkshop:
    """The lakehouse of this module's runs."""
    return KeyedWorkshop(tmp_path_factory.mktemp("seen") / "home")


@pytest.mark.parametrize(
    "kind",
    [
        "packed",
        "transformed",
        "followed",
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("mixed", "excluded")),
    ],
)
def test_seen_by_equals_tensors(shop: KeyedWorkshop, kind: str) -> None:
    """The checkpoints that have seen a row are those whose steps had it in a tensor. `keys_seen` has the rows of all of them."""
    KINDS[kind](shop)
    with open_audit(shop.lakehouse) as connection:
        shop.row_ids(connection, *TABLES[KINDS[kind]])
        steps = dict(connection.execute("SELECT step, checkpoint_id FROM lineage WHERE run = ?", [kind]).fetchall())
        wanted = {
            (row_id, steps[min(at for at in steps if at >= step)])
            for step, rows in shop.seen[kind].items()
            for row_id in rows
        }
        found = connection.execute(_SEEN, {"run": kind}).fetchall()
        assert {(row_id, checkpoint) for row_id, checkpoint, *_ in found} == wanted
        assert all(survives for *_, survives, _ in found)
        if kind == "packed":
            seen, tokens = shop.seen_until(kind, max(steps)), Counter(row_id for row_id, _, whole, *_ in found if whole)
            assert {row_id for row_id in seen if seen[row_id] == tokens_of(row_id)} == tokens.keys()
        head = steps[max(steps)]
        keys = connection.execute(
            "SELECT DISTINCT row_id FROM keys_seen(?) AS k JOIN source_rows AS s ON s.file = bare_path(k.file_path) AND "
            "s.file_row = k.row",
            [head],
        )
        assert {row_id for (row_id,) in keys.fetchall()} == {row_id for row_id, _ in wanted}
