"""The digest of a run's configuration: it depends on the training settings only, and older manifests have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.checkpoint.manifest import config_digest, parse_manifest
from dlac_pipeline.spec.job_spec import JobSpec
from tests.small_records import small_manifest, small_spec


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
    "sections",
    [
        {"source": {"row_filter": "x > 1"}},
        {"order": {"seed": 1}},
        {"sequences": {"length": 64}},
        {"params": {"lr": "0.1"}},
        {"launch": {"args": ["--lr=0.1"]}},
    ],
)
def test_training_settings_change_digest(script: Path, sections: dict[str, Any]) -> None:
    """Data, order, sequences, params and arguments change the digest."""
    assert config_digest(spec(script, **sections)) != config_digest(spec(script))


def test_script_content_changes_digest(script: Path, tmp_path: Path) -> None:
    """A copy of the file has the same digest, and other content has another one."""
    before = config_digest(spec(script))
    copy = tmp_path / "copy.py"
    copy.write_text(script.read_text())
    assert config_digest(spec(copy)) == before
    script.write_text("print(2)\n")
    assert config_digest(spec(script)) != before


@pytest.mark.parametrize(
    "sections", [{"checkpoint": {"every_steps": 7}}, {"launch": {"world_size": 4}}, {"read": {"threads": 9}}]
)
def test_launch_settings_keep_digest(script: Path, sections: dict[str, Any]) -> None:
    """Checkpoints, ranks and reading threads do not change the digest."""
    assert config_digest(spec(script, **sections)) == config_digest(spec(script))


def test_older_manifest_has_no_digest() -> None:
    """A manifest without the field is read, with an empty digest."""
    manifest = small_manifest(config_digest="d")
    content = manifest.to_bytes()
    assert parse_manifest(content, origin="here") == manifest
    raw = json.loads(content)
    del raw["config_digest"]
    assert parse_manifest(json.dumps(raw).encode(), origin="here").config_digest == ""
