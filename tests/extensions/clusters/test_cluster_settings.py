from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.launchers.protocol import render_job
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from tests.extensions.clusters.cluster import GOOD, cluster_request

pytestmark = pytest.mark.usefixtures("only_this_process")


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pods of a job."""
    (jobset,) = [
        one
        for one in yaml.safe_load_all(render_job(cluster_request("kubernetes", {"image": "i", **cluster})))
        if one["kind"] == "JobSet"
    ]
    return [job["template"]["spec"]["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]]


def test_option_without_value_is_flag() -> None:
    """Its name stands alone, without an equals sign."""
    script = render_job(cluster_request("slurm", {"options": {"exclusive": "", "comment": "word"}}))
    assert {"--exclusive", "--comment=word"} <= set(re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE))


def test_node_container_is_merged() -> None:
    """The container named `node` is merged into the pod's own, and others are added."""
    secret = {"secretRef": {"name": "db"}}
    volume = {"name": "key", "secret": {"secretName": "key"}}
    node = {
        "name": "node",
        "env": [{"name": "A", "value": "1"}],
        "envFrom": [secret],
        "volumeMounts": [{"name": "key", "mountPath": "/key"}],
    }
    (pod,) = pods({"pod": {"spec": {"containers": [{"name": "log"}, node], "volumes": [volume]}}})
    own, other = pod["containers"]
    assert (own["name"], own["image"], other["name"]) == ("node", "i", "log")
    assert own["envFrom"] == [secret]
    assert {mount["mountPath"] for mount in own["volumeMounts"]} == {"/etc/dlac", "/dev/shm", "/key"}
    assert {"A", "DLAC_REQUEST_FILE"} <= {one["name"] for one in own["env"]}
    assert volume in pod["volumes"]


@pytest.mark.parametrize(
    ("on", "cluster", "message"),
    [
        (
            "slurm",
            {"options": {"comment": "two words"}},
            r"cluster\.options\.comment without blanks.* found 'two words'",
        ),
        ("slurm", {"options": {"mail-type": "END#x"}}, r"cluster\.options\.mail-type .* found 'END#x'"),
        ("slurm", {"options": {"partition": "a b"}}, r"cluster\.options\.partition .* found 'a b'"),
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
def test_lost_setting_is_refused(on: str, cluster: dict[str, Any], message: str) -> None:
    """The error comes before a submission, and names the setting and the value found."""
    image = {"image": "i"} if on == "kubernetes" else {}
    with pytest.raises(SpecInvalid, match=message):
        render_job(cluster_request(on, image | cluster))


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ("checkpoint", {"store": "/scratch/ckpt"}),
        ("lakehouse", {**GOOD["lakehouse"], "warehouse": "file:///scratch/w"}),
    ],
)
def test_pod_local_folder_is_refused(section: str, place: dict[str, str]) -> None:
    """The store must be in a writable mount."""

    def job(**mount: Any) -> Request:
        container = {"name": "node", "volumeMounts": [{"name": "claim", "mountPath": "/scratch", **mount}]}
        cluster = {"image": "i", "pod": {"spec": {"containers": [container]}}}
        raw = {**GOOD, "launch": {**GOOD["launch"], "on": "kubernetes"}, "cluster": cluster}
        return Request(spec=parse_spec(raw | {section: place}, origin="the test"))

    render_job(job())
    for other in ({"mountPath": "/scratch2"}, {"readOnly": True}):
        with pytest.raises(SpecInvalid, match=r"that all pods reach, found '(file://)?/scratch/"):
            render_job(job(**other))
