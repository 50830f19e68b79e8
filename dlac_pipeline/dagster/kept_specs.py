"""Job specs of launches whose training has not ended: an edit of a job file changes neither their recovery nor their assets."""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from dlac_pipeline.lakehouse.config import home_folder
from dlac_pipeline.lakehouse.durable_io import make_folder_durably, write_durably
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec, parse_recorded

_log = logging.getLogger(__name__)


class KeptSpecs:
    """The specs that were launched from one job file, by run: a file each in the home folder."""

    def __init__(self, job_file: Path) -> None:
        digest = blake3(os.fsencode(job_file.resolve())).hexdigest(length=8)
        self._folder = home_folder().absolute() / "launched" / digest

    def keep(self, spec: JobSpec) -> None:
        """Keep the spec of a launch. Without it a recovery reads the job file, so a failure to write is only logged."""
        try:
            make_folder_durably(self._folder)
            self._folder.chmod(0o700)  # a spec may contain credentials
            write_durably(self._file(spec.run), spec.model_dump_json().encode())
        except OSError as err:
            _log.warning("the job spec of run %r is not kept, so its recovery reads the job file: %s", spec.run, err)

    def forget(self, run: str) -> None:
        """Remove the spec of a run whose training has ended."""
        with suppress(OSError):
            self._file(run).unlink()

    def of_run(self, run: str) -> JobSpec | None:
        """Return the spec with which a run was launched, or None if its training has ended. A damaged one is logged."""
        path = self._file(run)
        try:
            return parse_recorded(json.loads(path.read_bytes()), origin=repr(str(path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, SpecInvalid) as err:
            _log.warning("the kept job spec of run %r is not used: %s", run, err)
            return None

    def all(self) -> dict[str, JobSpec]:
        """Return all of them by the name of the run."""
        found = {path.stem: self.of_run(path.stem) for path in sorted(self._folder.glob("*.json"))}
        return {run: spec for run, spec in found.items() if spec is not None}

    def _file(self, run: str) -> Path:
        return self._folder / f"{run}.json"
