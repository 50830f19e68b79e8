from typing import Any

import pytest

from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from tests.conftest import Arena


@pytest.mark.slow
def test_attempts_without_commit_end_run(campaign: Arena) -> None:
    """Two attempts without a commit end in one status with the script's error. The incidents list both."""
    settings: dict[str, Any] = {"attempts_without_progress": 2, "deaths_at_same_rows": 0, "dies_at": 1}
    launch = campaign.launch(campaign.spec("hopeless", world_size=1, **settings))
    assert launch.wait() == 85
    (error,) = launch.of("error")
    assert error["kind"] == "NoProgress"
    assert "exit status 1" in error["message"]
    (given_up,) = launch.of("given_up")
    assert "exit status 1" in given_up["reason"]
    assert [row.attempt for row in campaign.rows("hopeless")] == [1, 2]
    outcomes = [(each.attempt, each.outcome) for each in recoveries_of(campaign.lakehouse, "hopeless")]
    assert sorted(outcomes) == [(2, "failed again"), (2, "gave up")]


@pytest.mark.parametrize(
    ("changes", "request_of", "code", "kind"),
    [
        ({"table": "src.nothing"}, {}, 64, "NoSuchTable"),
        ({"memory": "/dev/shmm/none"}, {}, 64, "SpecInvalid"),
        ({}, {"colour": "red"}, 64, "SpecInvalid"),
        pytest.param(
            {"columns": ["row_id", "even"], "ragged": ["even"]}, {}, 64, "UnsupportedColumn", marks=pytest.mark.soak
        ),
        pytest.param({"store": "/proc/version/store"}, {}, 74, "StoreUnavailable", marks=pytest.mark.soak),
    ],
)
def test_bad_input_ends_at_once(
    campaign: Arena, changes: dict[str, Any], request_of: dict[str, str], code: int, kind: str
) -> None:
    """A bad setting or request is one error event and its exit status. Nothing is claimed, and no rank remains."""
    launch = campaign.launch(campaign.spec("bad-input", **changes), **request_of)
    assert launch.wait() == code
    assert all(name in launch.of("error")[0]["message"] for name in request_of)
    assert [event["kind"] for event in launch.events if event["event"] != "alive"] == [kind]
    assert campaign.rows("bad-input") == []


@pytest.mark.slow
def test_missing_preload_ends_run_at_once(campaign: Arena) -> None:
    """Another attempt would import the same module."""
    launch = campaign.launch(campaign.spec("no-preload", preload=["no_such_module"]))
    assert launch.wait() == 64
    assert [event["kind"] for event in launch.of("error")] == ["ScriptInvalid"]
    assert len(launch.of("failure")) == 1


def test_unreachable_catalog_ends_at_once(campaign: Arena) -> None:
    """A first launch does not wait for an unreachable catalog."""
    spec = campaign.spec("unreachable")
    uri = "sqlite:////proc/nowhere/catalog.db"
    launch = campaign.launch(spec.model_copy(update={"lakehouse": spec.lakehouse.model_copy(update={"uri": uri})}))
    assert launch.wait() == 69
    assert uri in launch.of("error")[0]["message"]
