from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from catalog.errors import SpecInvalid
from dlac_pipeline.launchers.protocol import rendered
from dlac_pipeline.request import Request
from dlac_pipeline.spec import parse_spec
from tests.cluster import GOOD, asked

DOLLARS = "pa$$word $x $(HOME) ${app_id}"


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a job."""
    job = yaml.safe_load(rendered(asked("kubernetes", {"image": "i", **cluster})))
    return [task["template"]["spec"] for task in job["spec"]["tasks"]]


def test_an_option_without_a_value_is_a_flag() -> None:
    """Nothing behind its name, not even an equals sign."""
    script = rendered(asked("slurm", {"options": {"exclusive": "", "comment": "word"}}))
    (sbatch,) = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    assert {"--exclusive", "--comment=word"} <= set(sbatch.split())


def test_a_node_gets_a_secret_by_what_is_said_of_its_container() -> None:
    """A container named node is merged into each pod's own; others are added."""
    secret = {"secretRef": {"name": "db"}}
    volume = {"name": "key", "secret": {"secretName": "key"}}
    node = {"name": "node", "envFrom": [secret], "volumeMounts": [{"name": "key", "mountPath": "/key"}]}
    found = pods({"env": {"A": "1"}, "pod": {"spec": {"containers": [node, {"name": "log"}], "volumes": [volume]}}})
    assert len(found) == 4
    for number, pod in enumerate(found):
        own, other = pod["containers"]
        assert (own["name"], own["image"], other["name"]) == (f"node-{number}", "i", "log")
        assert own["envFrom"] == [secret]
        assert {mount["mountPath"] for mount in own["volumeMounts"]} == {"/dev/shm", "/key"}
        assert {"A", "DLAC_REQUEST"} <= {one["name"] for one in own["env"]}
        assert volume in pod["volumes"]


def test_dollars_in_variables_stay_as_they_are() -> None:
    """On Kubernetes two dollars are one, and a name in parentheses behind two is left alone."""
    own = pods({"env": {"A": DOLLARS}})[0]["containers"][0]
    (value,) = [one["value"] for one in own["env"] if one["name"] == "A"]
    assert value == DOLLARS.replace("$", "$$")
    assert "A=pa$$word $x $(HOME)" in rendered(asked("slurm", {"env": {"A": "pa$$word $x $(HOME)"}}))


@pytest.mark.parametrize(
    ("on", "cluster", "message"),
    [
        (
            "slurm",
            {"options": {"comment": "two words"}},
            r"cluster\.options\.comment without blanks.* found 'two words'",
        ),
        ("slurm", {"options": {"mail-type": "END#x"}}, r"cluster\.options\.mail-type .* found 'END#x'"),
        ("slurm", {"partition": "a b"}, r"cluster\.partition .* found 'a b'"),
        ("kubernetes", {"pod": {"foo": {}}}, r"expected no cluster\.pod\.foo"),
        (
            "kubernetes",
            {"pod": {"spec": {"terminationGracePeriodSeconds": 600}}},
            r"expected no cluster\.pod\.spec\.terminationGracePeriodSeconds",
        ),
        (
            "kubernetes",
            {"pod": {"spec": {"containers": [{"name": "node", "command": ["x"]}]}}},
            r"expected no cluster\.pod\.spec\.containers\.command",
        ),
        ("kubernetes", {"pod": {"spec": {"containers": [{"image": "x"}]}}}, r"expected a name for each"),
    ],
)
def test_what_would_be_lost_on_the_way_is_refused(on: str, cluster: dict[str, Any], message: str) -> None:
    """By name, with what was found, before anything is submitted."""
    image = {"image": "i"} if on == "kubernetes" else {}
    with pytest.raises(SpecInvalid, match=message):
        rendered(asked(on, image | cluster))


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ("checkpoint", {"store": "/scratch/ckpt"}),
        ("lakehouse", {**GOOD["lakehouse"], "warehouse": "file:///scratch/w"}),
    ],
)
def test_a_folder_that_ends_with_its_pod_is_refused(section: str, place: dict[str, str]) -> None:
    """It must be in a mount that can be written."""

    def job(**mount: Any) -> Request:
        mounts = [{"source": "claim", "path": "/scratch", **mount}]
        raw = {**GOOD, "launch": {**GOOD["launch"], "on": "kubernetes"}, "cluster": {"image": "i", "mounts": mounts}}
        return Request(spec=parse_spec(raw | {section: place}, origin="the test"))

    rendered(job())
    for other in ({"path": "/scratch2"}, {"read_only": True}):
        with pytest.raises(SpecInvalid, match=r"that all pods reach, found '(file://)?/scratch/"):
            rendered(job(**other))
