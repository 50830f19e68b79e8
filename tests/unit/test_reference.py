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


def test_job_spec_has_few_settings() -> None:
    """A setting that no user can choose better than the program is a constant of its module."""
    text = (_GENERATOR.parent / "reference" / "settings.md").read_text()
    assert sum(line.startswith("| `") for line in text.splitlines()) <= 108
