"""The check of a loader: a file of Python in, a verdict for each scenario out."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlac_pipeline.extensions.loader_check.client import LoaderFailed, LoaderProcess
from dlac_pipeline.extensions.loader_check.scenarios import SCENARIOS, Bench, Scenario, Size, run_and_count
from dlac_pipeline.extensions.loader_check.tables import Lake
from dlac_pipeline.lakehouse.errors import ScriptInvalid, SpecInvalid

_SIZE = Size(files=8, groups=8, group_rows=32, sequence=64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of one scenario. Without counts the loader does not offer it, or failed."""

    scenario: str
    description: str
    exact: bool | None
    """None: the loader does not offer it."""
    repeated: int | None = None
    missing: int | None = None
    remark: str = ""


def find_scenarios(names: Sequence[str]) -> list[Scenario]:
    """Return the scenarios of these names, all without a name. Raises `SpecInvalid` for an unknown one."""
    known = {each.name: each for each in SCENARIOS}
    if unknown := [name for name in names if name not in known]:
        raise SpecInvalid(f"expected scenarios of {', '.join(known)}, found {', '.join(unknown)}: correct --only")
    return [known[name] for name in names] or SCENARIOS


def judge_loader(
    file: Path,
    scenarios: Sequence[Scenario],
    *,
    python: str,
    workers: int,
    limit_s: float,
    progress: Callable[[int], None],
) -> list[Verdict]:
    """Run the loader of a file through scenarios, with the packages of an interpreter. Nothing is left on the disk.

    `progress` receives the number of scenarios that are done.

    Raises:
        SpecInvalid: the file or the interpreter does not exist.
        ScriptInvalid: the file cannot be imported, or defines no loader.
    """
    if file.suffix != ".py" or not file.is_file():
        raise SpecInvalid(
            f"expected a file of Python with a loader, found {str(file)!r}: see `dlac check-loader --example`"
        )
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="dlac-check-", ignore_cleanup_errors=True) as name, ExitStack() as hosts:
        scratch = Path(name)

        def open_host() -> LoaderProcess:
            return hosts.enter_context(closing(_open_host(file.resolve(), python, scratch / "loader")))

        host, other = open_host(), open_host()
        _check_names(host, file)
        lake = Lake(scratch / "lake")
        bench = Bench(host, lake, _SIZE, scratch, workers=workers, limit_s=limit_s, other=other)
        for number, scenario in enumerate(scenarios, 1):
            verdicts.append(_verdict(bench, scenario, open_host))
            progress(number)
    return verdicts


def _open_host(file: Path, python: str, scratch: Path) -> LoaderProcess:
    found = shutil.which(python)
    if found is None:
        raise SpecInvalid(f"expected an interpreter of Python, found {python!r}: correct --python")
    try:  # the path of a virtual environment's interpreter is a link, which is not followed
        return LoaderProcess(str(file), Path(found).absolute(), scratch, name="loader")
    except LoaderFailed as err:
        raise ScriptInvalid(f"expected a loader in {file.name}, found none: {err}") from err
    except (OSError, ValueError) as err:  # it cannot be executed, or its output is no answer
        raise SpecInvalid(f"expected an interpreter of Python, found {python!r}: {err}: correct --python") from err


def _check_names(host: LoaderProcess, file: Path) -> None:
    names = [each.name for each in SCENARIOS]
    if unknown := sorted(set(host.about["not_offered"]) - set(names)):
        raise ScriptInvalid(
            f"expected scenarios of {', '.join(names)} in NOT_OFFERED of {file.name}, found {', '.join(unknown)}: correct it"
        )


def _verdict(bench: Bench, scenario: Scenario, open_host: Callable[[], LoaderProcess]) -> Verdict:
    place: dict[str, Any] = {"scenario": scenario.name, "description": scenario.description}
    if (reason := scenario.refusal(bench.host.about["not_offered"])) is not None:
        return Verdict(**place, exact=None, remark=reason)
    bench.relaunched.clear()
    try:
        _replace_ended(bench, open_host)
        found = run_and_count(bench, scenario)
    except (LoaderFailed, ScriptInvalid) as err:
        first = [f"; the first time: {each}" for each in bench.relaunched if str(err) not in each]
        return Verdict(**place, exact=False, remark=f"failed: {err}{''.join(first)}")
    read = [] if found.appended_read is None else [f"read {found.appended_read:,} appended rows"]
    again = [f"a launch failed and was repeated: {each}" for each in bench.relaunched]
    remark = "; ".join([*found.remarks, *read, *again])
    return Verdict(**place, exact=found.exact, repeated=found.repeated, missing=found.missing, remark=remark)


def _replace_ended(bench: Bench, open_host: Callable[[], LoaderProcess]) -> None:
    """Open a process again that an earlier scenario has ended. Raises `ScriptInvalid` if the file cannot be imported now."""
    if bench.host.has_ended:
        bench.host = open_host()
    if bench.other is not None and bench.other.has_ended:
        bench.other = open_host()
