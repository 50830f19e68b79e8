"""Promises of the door `dlac.listeners`, by our listeners and one of another distribution: made, sent events, closed."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.extensions.listeners import main
from dlac_pipeline.extensions.listeners.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    InputTable,
    ProgressMade,
)
from dlac_pipeline.extensions.listeners.settings import ListenersSpec
from dlac_pipeline.lakehouse.errors import BadInput
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.extensions.listeners.listening import install_strangers, running_receiver
from tests.installed import install_distribution
from tests.ports import own_port
from tests.unit.test_spec import GOOD

FACTS: dict[str, Any] = {"run": "r1", "attempt": 1, "at": 1.0}
TABLE = InputTable(name="src.t", table="src.t", snapshot_id=5, rows=64)
START: dict[str, Any] = {
    **{"ledger": "u", "tables": (TABLE,), "world_size": 1, "nodes": 1, "step": 0, "resumed_from": None},
    **{"parent_run": "", "branch": 1, "branch_is_new": False, "rows_at_risk": 0},
}
STARTED = AttemptStarted(**FACTS, **START)
PROGRESS = ProgressMade(
    **FACTS, step=1, loss_step=1, loss=0.5, rows=32, rows_at_risk=32, rows_per_s=9.0, tokens_per_s=None
)
COMMIT: dict[str, Any] = {
    **{"step": 2, "checkpoint_id": "c", "location": "file:///c", "ledger_snapshot_id": 7, "bytes": 1},
    **{"duration_s": 0.1, "rows_by_table": {"src.t": 64}, "losses": (1.0, 0.5), "rows_at_risk": 0},
}
COMMITTED = CheckpointCommitted(**FACTS, **COMMIT)
ENDED = AttemptEnded(**FACTS, ending="finished", reason="", step=2)
NAMES = ("mlflow", "openlineage", "opentelemetry", "prometheus", "records", "wandb")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def spec_with(name: str, folder: Path) -> JobSpec:
    """Return a job spec with one listener, which writes to a folder or to servers of the test."""
    options: dict[str, dict[str, Any]] = {
        "prometheus": {"port": own_port()},
        "records": {"path": str(folder / "events.jsonl")},
    }
    return parse_spec({**GOOD, "listeners": {name: options.get(name, {})}}, origin="the test")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_listener_takes_events(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each listener is made by its name from the options of its table, takes an attempt's events, and closes."""
    monkeypatch.syspath_prepend(str(install_strangers(tmp_path)))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    spec = spec_with(name, tmp_path)
    settings = spec.section(ListenersSpec)
    with running_receiver() as receiver:
        monkeypatch.setenv("OPENLINEAGE_URL", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        settings.check_here()
        listener = main.make_listener(name, settings.chosen()[name], spec)
        for event in (STARTED, PROGRESS, COMMITTED, ENDED):
            listener.on_event(event)
        getattr(listener, "close", lambda: None)()
    if name == "records":
        kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert kinds == ["AttemptStarted", "ProgressMade", "CheckpointCommitted", "AttemptEnded", "closed"]


def test_spec_is_passed_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener of another distribution with a parameter `spec` receives the job spec, as ours do."""
    source = "class Asks:\n    def __init__(self, spec, level):\n        self.seen = (spec.run, level)\n"
    points = {"dlac.listeners": ["asks = asking:Asks"]}
    monkeypatch.syspath_prepend(str(install_distribution(tmp_path, "asking", {"asking": source}, points)))
    spec = parse_spec({**GOOD, "listeners": {"asks": {"level": 3}}}, origin="the test")
    made: Any = main.make_listener("asks", spec.section(ListenersSpec).chosen()["asks"], spec)
    assert made.seen == ("r1", 3)


def test_missing_package_is_found_unimported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check names a package that a listener imports and that is not installed, and imports neither of them."""
    source = "import os\nimport feathers_of_no_bird.tail\nraise RuntimeError('imported')\n"
    points = {"dlac.listeners": ["owl = owls:Owl [birds]"]}
    monkeypatch.syspath_prepend(str(install_distribution(tmp_path, "zoo", {"owls": source}, points)))
    spec = parse_spec({**GOOD, "listeners": {"owl": {}}}, origin="the test")
    message = r'the package feathers_of_no_bird\.tail for \[listeners\.owl\], found none: pip install "zoo\[birds\]"'
    with pytest.raises(BadInput, match=message):
        spec.section(ListenersSpec).check_here()
