"""The page of a model: no picture makes a finished training fail."""

from typing import Any

import pytest

from dlac_pipeline.dagster.assets.pages import model_page
from dlac_pipeline.extensions.look import plots
from tests.conftest import Arena


@pytest.mark.slow
def test_undrawn_picture_fails_nothing(arena: Arena) -> None:
    """In place of a picture that cannot be drawn the page has the reason. All other pictures stay."""
    arena.table(appends=(64,))
    arena.train(arena.spec("r", world_size=1, passes=1))

    def draw(*content: Any) -> bytes:
        raise ValueError("no font")

    arena.monkeypatch.setattr(plots, "draw_coverage", draw)
    page = model_page(arena.lakehouse, "r")
    assert page["coverage"] == "not drawn: ValueError: no font"
    assert "data:image/png" in page["time"].value
