"""The optional environments of what DLAC is compared with: made on demand with pip, next to the project's own.

MosaicML Streaming and torchtitan have their own: the one needs numpy < 2.2 and transformers < 5, the other datasets < 4.8, which
the others do not allow. LanceDB, Ray and DLRover have their own too, because each brings much that the others do not need.
Megatron has its own: Megatron-Bridge asks for packages that only build beside CUDA, and its sampler needs none of them.
"""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dlac_pipeline.extensions.loader_check.client import LoaderFailed, LoaderProcess

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder with an interpreter and installed packages, or the project's own environment without requirements."""

    folder: str
    requirements: str = ""
    complete: bool = False
    """Whether the file lists all that is used: packages that these ask for beyond it are not installed."""


OWN = Environment(".venv")
SHARED = Environment(".venv-peers", "benchmarks/peers-requirements.txt")
TORCHTITAN = Environment(".venv-peers-torchtitan", "benchmarks/peer_loaders/torchtitan-requirements.txt")
MOSAIC = Environment(".venv-peers-mosaic", "benchmarks/peer_loaders/mosaic-requirements.txt")
LANCEDB = Environment(".venv-peers-lance", "benchmarks/peer_loaders/lance-requirements.txt")
RAY = Environment(".venv-peers-ray", "benchmarks/peer_loaders/ray-requirements.txt")
MEGATRON = Environment(".venv-peers-megatron", "benchmarks/peer_loaders/megatron-requirements.txt", complete=True)
DLROVER = Environment(".venv-peers-dlrover", "benchmarks/peer_loaders/dlrover-requirements.txt")


def python_of(environment: Environment) -> Path:
    """Return the environment's interpreter. A missing or outdated environment is made first (minutes).

    Raises:
        LoaderFailed: it cannot be installed. The message is pip's last line.
    """
    if not environment.requirements:
        return Path(sys.executable)
    folder, requirements = _ROOT / environment.folder, _ROOT / environment.requirements
    python, stamp = folder / "bin" / "python", folder / ".ready"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making {environment.folder} from {environment.requirements}: once, a few minutes", flush=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    (folder / ".gitignore").write_text("*\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)]
    _run([*install, "--no-deps"] if environment.complete else install)
    stamp.write_text(wanted)
    return python


def environment_of(scratch: Path) -> dict[str, str]:
    """Return the environment variables of a loader's process: caches in a folder, no network, one thread."""
    caches = {name: str(scratch / "cache") for name in ("HF_HOME", "DATA_OPTIMIZER_CACHE_FOLDER", "LITDATA_CACHE_DIR")}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    one_thread = {"OMP_NUM_THREADS": "1"}  # torch's own threads: a loader has its workers
    return {**os.environ, "PYTHONPATH": str(_ROOT), "TMPDIR": str(scratch), **caches, **quiet, **one_thread}


def open_host(name: str, environment: Environment, scratch: Path) -> LoaderProcess:
    """Return the process of a loader of this package. Raises `LoaderFailed` if it cannot be installed or imported."""
    python, module = python_of(environment), f"{__package__}.{name}"
    return LoaderProcess(module, python, scratch, name=name, environment=environment_of(scratch))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as err:
        raise LoaderFailed(f"cannot be installed: not done within {_LIMIT_S:g} s") from err
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise LoaderFailed(f"cannot be installed: {lines[0] if lines else done.returncode}")
