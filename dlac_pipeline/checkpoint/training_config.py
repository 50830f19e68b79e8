"""Digest of what a model was trained with: two checkpoints with the same digest differ by data and steps alone."""

import json
from pathlib import Path

from blake3 import blake3

from dlac_pipeline.spec.job_spec import JobSpec

_TRAINING = {"source", "mixture", "sequences", "order", "params"}
"""Sections that determine training.

The places of lakehouse and store, the number of ranks and their supervision change no model.
"""


def config_digest(spec: JobSpec) -> str:
    """BLAKE3 of the spec's training sections, and of the script with its arguments, as hex."""
    config = spec.model_dump(mode="json", include=_TRAINING)
    for source in (config["source"], *config["mixture"]):
        source["row_filter"] = source["row_filter"] or ""  # as earlier versions wrote a missing filter
    config["script"] = _digest_of(Path(spec.launch.script))
    config["args"] = spec.launch.args
    return blake3(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _digest_of(script: Path) -> str | None:
    """None for a script that is not there, as when another launcher was given another one."""
    try:
        return blake3(script.read_bytes()).hexdigest()
    except OSError:
        return None
