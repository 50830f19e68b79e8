"""Places of a run's checkpoints: made in a local folder, copied to the store, under the same names in both.

If the store is that local folder, one copy exists. Nothing is ever overwritten. The run's folder is made before an attempt and
never later: if it is missing then, its mount is gone.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dlac_pipeline.lakehouse.durable_io import make_folder_durably, write_durably
from dlac_pipeline.lakehouse.errors import SpecInvalid, StoreUnavailable
from dlac_pipeline.lakehouse.named_catalogs import check_properties, configured
from dlac_pipeline.lakehouse.store_files import StoreFiles, below, is_local, make_below, path_at
from dlac_pipeline.spec.job_spec import JobSpec

MANIFEST = "manifest.json"
DEADLINE_S = 120.0
"""Seconds for which a failed request to the store is retried: longer than the failover of an object store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """The places of one run's checkpoints. `run` names its folder in each."""

    run: str
    local: Path
    """Folder in which checkpoints are made."""
    store: str | None
    """Address of the durable copies, or None if `local` is the store."""
    files: StoreFiles

    def folder(self, name: str) -> Path:
        """Return the folder in which the checkpoint `name` is made."""
        return self.local / self.run / name

    def copy_of(self, name: str) -> str | None:
        """Address of its copy in the store, if that is another place."""
        return None if self.store is None else below(self.store, self.run, name)

    def manifest_uri(self, name: str) -> str:
        """Address of its manifest in the store."""
        copy = self.copy_of(name)
        return (self.folder(name) / MANIFEST).resolve().as_uri() if copy is None else below(copy, MANIFEST)

    def durable_run(self) -> str:
        """Address of the run's folder in the store."""
        return str(self.local / self.run) if self.store is None else below(self.store, self.run)

    def make(self, name: str) -> None:
        """Make the folder in which the checkpoint `name` is made, in its run's folder. Raises as `storing`."""
        folder = self.folder(name)
        with storing(folder):
            make_below(self.local / self.run, folder)

    def put(self, source: Path, name: str, path: str) -> None:
        """Copy a file to its place in the checkpoint `name` in the store, which is another place. Raises as `make`."""
        copy = self.copy_of(name)
        assert copy is not None, "there is one place only"
        self.files.put(source, below(copy, path), within=self.durable_run())

    def check_writable(self) -> None:
        """Make the run's folders, on every node before an attempt. Raise `StoreUnavailable` if one cannot be written."""
        folder = self.local / self.run
        with storing(folder):
            make_folder_durably(folder)
            probe = folder / f".probe-{secrets.token_hex(4)}"  # several nodes may do this at once
            write_durably(probe, b"dlac")
            probe.unlink()
        if self.store is not None:
            run = self.durable_run()
            self.files.make(run)
            self.files.write(below(run, ".dlac"), b"Checkpoints of a DLAC run; see its ledger.\n", within=run)


def tiers_of(spec: JobSpec) -> Tiers:
    """Return the places of the checkpoints of a resolved spec."""
    settings = spec.checkpoint
    check_properties(settings.store_properties)
    properties = {**configured(spec.lakehouse).properties, **settings.store_properties}
    files = StoreFiles(properties, deadline_s=DEADLINE_S)
    local, store = Path(settings.local), _address(settings.store)
    return Tiers(run=spec.run, local=local, store=None if store == local.resolve().as_uri() else store, files=files)


def stage_name(*, attempt: int, step: int, nonce: str) -> str:
    """Return the name of one checkpoint in its run's folder. It is unique, because the nonce belongs to this launch."""
    return f"attempt-{attempt:04d}/step-{step:09d}-{nonce}"


def attempt_of(name: str) -> int | None:
    """Return the attempt that staged the checkpoint `name`, or None for another kind of name."""
    number = name.split("/", maxsplit=1)[0].removeprefix("attempt-")
    return int(number) if number.isdigit() else None


def folder_uri(manifest_uri: str) -> str:
    """Return the address of a manifest's folder."""
    return manifest_uri.rsplit("/", 1)[0]


def folder_of(manifest_uri: str) -> Path:
    """Return the folder of a manifest's `file://` address."""
    return path_at(folder_uri(manifest_uri))


def folder_name_of(manifest_uri: str) -> str:
    """The name, in its run's folder, of the checkpoint that a manifest is of."""
    return "/".join(folder_uri(manifest_uri).split("/")[-2:])


@contextmanager
def storing(folder: Path, what: str = "the checkpoint store") -> Iterator[None]:
    """Turn the failures of a folder that is full, read-only or away into `StoreUnavailable`."""
    try:
        yield
    except OSError as err:
        raise StoreUnavailable(
            f"expected to write to {what} at {str(folder)!r}, found {type(err).__name__}: {err}; free or mount it: what is "
            "committed is untouched"
        ) from err


def _address(store: str) -> str:
    if is_local(store):
        return path_at(store).resolve().as_uri()
    if set(store) & set("?#"):
        raise SpecInvalid(f"expected an address of the checkpoint store without '?' and '#', found {store!r}")
    return store.rstrip("/")
