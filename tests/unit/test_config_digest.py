"""The digest of a run's configuration: it depends on the training settings only, and older manifests have none."""

from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.checkpoint.manifest import config_digest
from dlac_pipeline.spec.job_spec import JobSpec
from tests.small_records import small_spec


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Write a training script."""
    path = tmp_path / "train.py"
    path.write_text("print(1)\n")
    return path


def spec(script: Path, **sections: dict[str, Any]) -> JobSpec:
    """Return a job spec with further settings in some sections."""
    return small_spec(**{**sections, "launch": {"script": str(script), **sections.get("launch", {})}})


@pytest.mark.parametrize(
    ("sections", "changes"),
    [
        ({"source": {"row_filter": "x > 1"}}, True),
        ({"order": {"seed": 1}}, True),
        ({"sequences": {"length": 64}}, True),
        ({"params": {"lr": "0.1"}}, True),
        ({"launch": {"args": ["--lr=0.1"]}}, True),
        ({"checkpoint": {"every_steps": 7}}, False),
        ({"launch": {"world_size": 4}}, False),
        ({"read": {"threads": 9}}, False),
    ],
)
def test_training_settings_change_digest(script: Path, sections: dict[str, Any], changes: bool) -> None:
    """Data, order, sequences, params and arguments change the digest. Checkpoints, ranks and reading threads do not."""
    assert (config_digest(spec(script, **sections)) != config_digest(spec(script))) == changes


def test_script_content_changes_digest(script: Path, tmp_path: Path) -> None:
    """A copy of the file has the same digest, and other content has another one."""
    before = config_digest(spec(script))
    copy = tmp_path / "copy.py"
    copy.write_text(script.read_text())
    assert config_digest(spec(copy)) == before
    script.write_text("print(2)\n")
    assert config_digest(spec(script)) != before
