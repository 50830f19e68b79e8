"""Digest of what a model was trained with: two checkpoints with the same digest differ by data and steps alone."""

import json
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from dlac_pipeline.spec.job_spec import JobSpec

_TRAINING = {"source", "mixture", "sequences", "order", "params"}
"""Sections that determine training. Places, the number of ranks and their supervision change no model."""


def config_digest(spec: JobSpec) -> str:
    """BLAKE3 of the spec's training sections, and of the script with its arguments, as hex."""
    config = spec.model_dump(mode="json", include=_TRAINING)
    for source in (config["source"], *config["mixture"]):
        source["row_filter"] = source["row_filter"] or ""  # as earlier versions wrote a missing filter
    config |= {"script": None, "args": spec.launch.args}
    with suppress(OSError):  # as when another launcher was given another script
        config["script"] = blake3(Path(spec.launch.script).read_bytes()).hexdigest()
    return blake3(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
