"""Promises of the door `dlac.settings`, by the sections cluster and listeners, and by one of another distribution."""

import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlac_pipeline.lakehouse.errors import BadInput, SpecInvalid
from dlac_pipeline.lakehouse.masking import mask_setting
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.spec.sections import section_class
from dlac_pipeline.supervise.ranks.run_events import report_command
from tests.installed import install_launcher
from tests.unit.test_spec import GOOD

SECRET = "hunter2-of-the-test"
TABLES: dict[str, dict[str, Any]] = {
    "cluster": {"gpu": 3, "options": {"WANDB_API_KEY": SECRET}},
    "listeners": {"prometheus": {"port": 9465}},
    "mark": {"text": "x", "token": SECRET},
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "cluster": ({"gpuu": SECRET}, r"cluster\.gpuu: unknown field, did you mean 'gpu'\? \(found str\)"),
    "listeners": ({"prometheus": {"port": -1}}, r"listeners\.prometheus\.port: .*found -1"),
    "mark": ({"most": True}, r"mark\.most: expected a number of at least 1 and of at most 99, found True"),
}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of another distribution, which is on the search path."""
    folder = install_launcher(tmp_path / "installed")
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.parametrize("name", TABLES)
def test_section_survives_request(name: str) -> None:
    """A request that was sent as JSON has the section, which is found by its class. Secrets in it are masked."""
    request = Request(spec=parse_spec({**GOOD, name: TABLES[name]}, origin="the test"))
    again = Request.model_validate_json(request.model_dump_json())
    kind = section_class(name)
    assert again == request
    assert again.spec.section(kind) == kind.model_validate(TABLES[name])
    assert SECRET not in str(mask_setting("", again.spec.model_dump()))


@pytest.mark.parametrize("name", TABLES)
def test_wrong_setting_is_named(name: str) -> None:
    """A wrong setting of a section is named with its table, beside wrong settings of the core. A secret is not shown."""
    table, message = WRONG[name]
    with pytest.raises(SpecInvalid, match=message) as refused:
        parse_spec({**GOOD, "order": {"batch_size": 0, "key_groups": 8}, name: table}, origin="the test")
    assert "order.batch_size" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_unknown_section_is_refused() -> None:
    """A table that no extension owns is an unknown field, whose probable meaning may be an installed section."""
    with pytest.raises(SpecInvalid, match=r"marks: unknown field, did you mean 'mark'\? \(found dict\)"):
        parse_spec({**GOOD, "marks": {}}, origin="the test")


def test_section_is_imported_on_use(installed: Path) -> None:
    """A spec without a section imports none, and one with it imports this one only."""
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(installed)!r})
        from dlac_pipeline.spec.job_spec import parse_spec
        def loaded():
            return sorted({{"strange_launcher", "dlac_pipeline.extensions.clusters.settings"}} & set(sys.modules))
        parse_spec({GOOD!r}, origin="the test")
        print(loaded())
        parse_spec({{**{GOOD!r}, "cluster": {{}}}}, origin="the test")
        print(loaded())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['dlac_pipeline.extensions.clusters.settings']"]


def test_section_is_checked_before_launch(tmp_path: Path) -> None:
    """A section refuses a machine on which something that it names is missing."""
    script = tmp_path / "train.py"
    script.touch()
    raw = {**GOOD, "launch": {"script": str(script)}, "mark": {"text": "missing"}}
    with pytest.raises(BadInput, match="expected a mark that is installed"):
        Request(spec=parse_spec(raw, origin="the test")).check_here()


class Heard(AbstractContextManager["Heard"]):
    """A receiver of another author, which keeps events and the error that ends the launch."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def send(self, event: dict[str, Any]) -> None:
        """Keep an event."""
        self.events.append(event)

    def __exit__(self, kind: object, err: BaseException | None, trace: object) -> None:
        self.events.append({"event": "closed"})


def test_receiver_gets_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first section with a receiver gets the events of a command, and then its context ends."""
    heard = Heard()
    monkeypatch.setattr(section_class("mark"), "event_receiver", lambda *section, **launch: heard, raising=True)
    report_command(parse_spec({**GOOD, **TABLES}, origin="the test"), {"event": "went_back"})
    assert [each["event"] for each in heard.events] == ["went_back", "closed"]


def test_unused_receiver_starts_nothing() -> None:
    """Listeners start with the first event. Those that are asked during a launch only receive none of a command."""
    spec = parse_spec({**GOOD, "listeners": TABLES["listeners"]}, origin="the test")
    receiver, before = spec.event_receiver(launched_by="test"), psutil.Process().children()
    assert receiver is not None
    with receiver:
        assert psutil.Process().children() == before
    assert spec.event_receiver(is_command=True) is None
    assert parse_spec(GOOD, origin="the test").event_receiver() is None
