"""Megatron-Energon over WebDataset shards, with its metadata set for two sources, and its tool for other numbers of ranks."""

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

from benchmarks.mesh_peers.cases import MICRO_BATCH

_SHARDS, _BUFFER = 8, 16
_TOOL = [str(Path(sys.executable).with_name("energon"))]


def write(folder: Path, source: str, rows: range) -> None:
    """Add shards, and prepare the folder again."""
    path = folder / source
    path.mkdir(exist_ok=True)
    count = len(rows) // _SHARDS
    for number in range(_SHARDS):
        with tarfile.open(path / f"shard-{rows.start:06}-{number:03}.tar", "w") as shard:
            for row in rows[number * count : (number + 1) * count]:
                content = str(row).encode()
                about = tarfile.TarInfo(f"{row:09}.txt")
                about.size = len(content)
                shard.addfile(about, io.BytesIO(content))
    _run("prepare", "--non-interactive", "--force-overwrite", "--split-ratio", "1,0,0", "--num-workers", "1",
         "--sample-type", "TextSample", "--field-map", '{"text": "txt"}', "--no-progress", str(path))  # fmt: skip


def open_rank(folder: Path, weights: dict[str, float], rank: int, ranks: int, state: Any) -> "_Rank":
    """Return the loader of a rank."""
    return _Rank(folder, weights, rank, ranks, state)


def reshard(states: list[Any], ranks: int) -> list[Any]:
    """Distribute the states by the tool."""
    with tempfile.TemporaryDirectory() as scratch:
        files = [str(Path(scratch, f"state-{rank}.pt")) for rank in range(len(states))]
        for file, state in zip(files, states, strict=True):
            torch.save(state, file)
        Path(scratch, "new").mkdir()
        _run("checkpoint", "redist", *files, f"{scratch}/new", "--new-world-size", str(ranks))
        return [torch.load(f"{scratch}/new/state-{rank}.pt", weights_only=False) for rank in range(ranks)]


def _run(*arguments: str) -> None:
    done = subprocess.run([*_TOOL, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])


class _Rank:
    def __init__(self, folder: Path, weights: dict[str, float], rank: int, ranks: int, state: Any) -> None:
        path = folder / "one"
        if len(weights) > 1:
            path = folder / "metadataset.yaml"
            blend = [{"weight": weight, "path": f"./{name}"} for name, weight in weights.items()]
            about = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
            path.write_text(yaml.safe_dump({**about, "splits": {"train": {"blend": blend}}}))
        workers = len(state.worker_states) if state is not None else 1
        dataset = get_train_dataset(
            path,
            worker_config=WorkerConfig(rank=rank, world_size=ranks, num_workers=workers),
            batch_size=MICRO_BATCH,
            shuffle_buffer_size=_BUFFER,
            max_samples_per_sequence=_BUFFER,
            repeat=len(weights) > 1,
        )
        self._loader = get_savable_loader(dataset)
        if state is not None:
            self._loader.restore_state_rank(state)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._loader:
            yield [int(text) for text in batch.text]

    def state(self) -> Any:
        return self._loader.save_state_rank()
