"""The measured device, found by a separate process: the one that starts ranks must not open the driver."""

import json
import os
import platform
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"
PROGRAMS = Path(__file__).parents[1] / "programs"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredNode:
    """The node of a measurement."""

    device: str
    """The type of its accelerators, as PyTorch names it, or "cpu"."""
    name: str
    count: int
    """Number of accelerators."""
    backend: str
    """Backend of the process group of its ranks."""
    torch: str
    system: str

    @property
    def accelerated(self) -> bool:
        """Whether it has an accelerator."""
        return self.count > 0

    @property
    def ranks(self) -> int:
        """Ranks of a run: two, or one for a single accelerator, which NCCL gives to one rank."""
        return min(2, self.count) if self.accelerated else 2

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a rank on it."""
        return {} if self.accelerated else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def find_node() -> MeasuredNode:
    """Return this node."""
    return MeasuredNode(**run_program([sys.executable, "-m", __name__]))


def run_program(command: list[str], *, limit_s: float | None = None) -> dict[str, Any]:
    """Run a program of a benchmark, and return the JSON object on its last line.

    Raises:
        RuntimeError: the program failed, printed nothing, or did not end within `limit_s`. It is killed with its children then.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as program:
        try:
            output, errors = program.communicate(timeout=limit_s)
        except BaseException as err:
            os.killpg(program.pid, signal.SIGKILL)
            if not isinstance(err, subprocess.TimeoutExpired):
                raise
            raise RuntimeError(f"expected {command[1:3]!r} to end within {limit_s:.0f} s, found it running") from err
    if program.returncode != 0 or not output:
        raise RuntimeError(
            f"expected {command[1:3]!r} to print its figures and end with status 0, found {program.returncode}: {errors[-2000:]}"
        )
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def _here() -> MeasuredNode:
    import torch
    from torch.distributed import get_default_backend_for_device

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if accelerator is None else accelerator.type
    module: Any = torch.get_device_module(device)
    name = module.get_device_name() if hasattr(module, "get_device_name") else f"{os.cpu_count()} cores"
    return MeasuredNode(
        device=device,
        name=name,
        count=0 if accelerator is None else torch.accelerator.device_count(),
        backend=get_default_backend_for_device(device),
        torch=torch.__version__,
        system=f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_here())))
