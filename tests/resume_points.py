"""Resume points for tests."""

from typing import Any

from dlac_pipeline.checkpoint.restore.resume_point import FromMemory


def memory_point(**facts: Any) -> FromMemory:
    """Return a resume point of attempt 3 at a state in memory of attempt 2, with other facts where they are given."""
    attempt = {"attempt": 3, "nonce": "c", "replaces": 2, "leg": "{}", "leg_is_new": False}
    state = {"step": 7, "memory_of": 2, "memory_at": 0.0, "folder": "", "world_size": 1}
    engine = {"engine": "", "loads_own_files": False}
    head = {"checkpoint_id": None, "head_step": 0, "head_at": 0.0, "manifest_uri": ""}
    return FromMemory(**{**attempt, **state, **engine, **head, **facts})
