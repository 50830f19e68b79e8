import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlac_pipeline.extensions.replay.replay import PREFIX, sandbox

OWNER = """
import sys, time
from pathlib import Path
from dlac_pipeline.extensions.replay.replay import sandbox
with sandbox(Path(sys.argv[1])) as folder:
    (folder / "checkpoint").write_text("large")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_sandbox_is_always_removed(tmp_path: Path) -> None:
    """The sandbox is removed even if its body raises."""
    with pytest.raises(FileNotFoundError), sandbox(tmp_path / "new") as folder:
        (folder / "nowhere" / "file").touch()
    assert not list((tmp_path / "new").iterdir())


def test_next_sandbox_removes_killed_one_only(tmp_path: Path) -> None:
    """The folder of a living owner stays, and so does any folder that is no sandbox."""
    (tmp_path / "other").mkdir()
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        with sandbox(tmp_path):
            assert (left / "checkpoint").exists()
        owner.kill()
        owner.wait()
    assert (left / "checkpoint").exists()
    with sandbox(tmp_path) as mine:
        assert sorted(os.listdir(tmp_path)) == sorted(["other", mine.name])
        assert mine.name.startswith(PREFIX)
