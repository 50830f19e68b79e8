"""The page of a model: a name in a picture is no formula, and no picture makes a finished training fail."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlac_pipeline.dagster.assets.pages import model_page
from dlac_pipeline.extensions.look import plots
from dlac_pipeline.extensions.registration.register import register
from tests.conftest import Arena

_PICTURES = ("loss_curve", "coverage", "checkpoint_cost", "time")


@pytest.fixture
def run(arena: Arena, tmp_path: Path) -> str:
    """A finished run over a file whose name would be a broken formula."""
    (tmp_path / "pages").mkdir()
    pq.write_table(pa.table({"row_id": range(16), "x": [[1.0] * 4] * 16}), tmp_path / "pages/$x^{$.parquet")
    register(arena.lakehouse, "docs.pages", str(tmp_path / "pages"))
    spec = arena.spec("r", world_size=1, table="docs.pages", columns=["row_id", "x"], batch_size=8, passes=1)
    arena.train(spec)
    return "r"


def test_undrawn_picture_fails_nothing(arena: Arena, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a picture that cannot be drawn the page has the reason. All other pictures stay."""

    def draw(*content: Any) -> bytes:
        raise ValueError("no font")

    monkeypatch.setattr(plots, "draw_coverage", draw)
    page = model_page(arena.lakehouse, run)
    assert page["coverage"] == "not drawn: ValueError: no font"
    assert "data:image/png" in page["time"].value
