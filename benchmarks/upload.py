"""Upload of a checkpoint of 1 GB to SeaweedFS's S3 store, beside the library's own: `python -m benchmarks.upload [--quick]`.

One file is uploaded by DLAC's checkpoint store, by obstore alone with the same parts, and by pyarrow, in turn and in another
order in each round. The server, its disk and the client share this machine. Every object is deleted before the next upload.
`--quick` takes 128 MB and three rounds.
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from obstore.store import S3Store

from benchmarks.figures import Figure, report
from dlac_pipeline.lakehouse.store_files import StoreFiles
from tests.seaweedfs import SeaweedFS, seaweedfs

_CHUNK_BYTES = 8 << 20


def main() -> int:
    """Measure and report. Return the exit status."""
    quick = "--quick" in sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="dlac-upload-") as folder, seaweedfs(Path(folder)) as server:
        source = Path(folder) / "state.pt"
        with source.open("wb") as stream:
            for _ in range((128 << 20 if quick else 1 << 30) // _CHUNK_BYTES):
                stream.write(os.urandom(_CHUNK_BYTES))
        figures = _measure(source, server, rounds=3 if quick else 7)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("upload", figures)
    return 0 if all(figure.holds for figure in figures.values()) else 1


def _measure(source: Path, server: SeaweedFS, *, rounds: int) -> dict[str, Figure]:
    sides: list[tuple[str, Callable[[str], None]]] = [
        ("dlac", _dlac(source, server)),
        ("obstore", _obstore(source, server)),
        ("pyarrow", _pyarrow(source, server)),
    ]
    orders = list(itertools.permutations(sides))
    files = StoreFiles(server.properties)
    seconds: dict[str, list[float]] = {name: [] for name, _ in sides}
    for number in range(rounds + 1):
        for name, upload in orders[number % len(orders)]:
            began = time.monotonic()
            upload(f"{name}/state.pt")
            if number:  # the first round fills caches and pools of connections
                seconds[name].append(time.monotonic() - began)
            files.remove(f"s3://store/{name}")
    megabytes = source.stat().st_size / 1e6
    ratios = {
        name: [other / own for other, own in zip(seconds[name], seconds["dlac"], strict=True)] for name in seconds
    }
    return {
        **{
            f"{name}_mb_s": Figure(value=megabytes / statistics.median(took), unit="MB/s")
            for name, took in seconds.items()
        },
        "dlac_to_obstore": Figure(value=statistics.median(ratios["obstore"]), unit="of its throughput", bar=">= 0.9"),
        "dlac_to_pyarrow": Figure(value=statistics.median(ratios["pyarrow"]), unit="of its throughput"),
    }


def _dlac(source: Path, server: SeaweedFS) -> Callable[[str], None]:
    files = StoreFiles(server.properties)
    return lambda key: files.put(source, f"s3://store/{key}", within="s3://store")


def _obstore(source: Path, server: SeaweedFS) -> Callable[[str], None]:
    named = {name.removeprefix("s3.").replace("-", "_"): value for name, value in server.properties.items()}
    store = S3Store("store", client_options={"allow_http": True}, **named)  # type: ignore[arg-type]  # its settings by name
    return lambda key: store.put(key, source) and None


def _pyarrow(source: Path, server: SeaweedFS) -> Callable[[str], None]:
    files = server.files

    def upload(key: str) -> None:
        with source.open("rb") as stream, files.open_output_stream(f"store/{key}") as target:
            while chunk := stream.read(_CHUNK_BYTES):
                target.write(chunk)

    return upload


if __name__ == "__main__":
    sys.exit(main())
