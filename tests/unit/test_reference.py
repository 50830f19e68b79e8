from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_GENERATOR = Path(__file__).parents[2] / "docs" / "generate.py"


@pytest.mark.parametrize("name", ["commands.md", "settings.md", "job.schema.json"])
def test_reference_matches_code(name: str) -> None:
    """The reference pages are generated. Run `make docs` after a change of a command or a setting."""
    spec = importlib.util.spec_from_file_location("generate", _GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (generator.PAGES / name).read_text() == generator.pages()[name]
