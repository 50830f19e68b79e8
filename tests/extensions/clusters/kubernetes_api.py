"""A small Kubernetes API server without a cluster: it accepts a job, and runs each pod's command as a local process."""

import json
import os
import re
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

_OBJECT = re.compile(
    r"/(?:api|apis)/.*?/namespaces/(?P<namespace>[^/]+)/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?P<log>/log)?$"
)
_TOKEN = "token-of-the-test"
Document = dict[str, Any]


class Pod:
    """A process, and its log with a time before each line."""

    def __init__(self, name: str, index: int, template: Document, secret: Path) -> None:
        self.name, self.index, self.uid = name, index, str(uuid.uuid4())
        (container,) = template["spec"]["containers"]
        environment = {one["name"]: one["value"].replace("$$", "$") for one in container["env"] if "value" in one}
        environment["DLAC_NODE_NAME"] = f"node-{index}"  # the one that names a field of the pod
        # paths and names of the pod, as they are on this node
        environment |= {"DLAC_REQUEST_FILE": str(secret / "request"), "DLAC_FIRST_NODE": "localhost"}
        environment |= {"DLAC_RENDEZVOUS_KEY_FILE": str(secret / "rendezvous-key")}
        self.lines: list[str] = []
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
        self._process: subprocess.Popen[str] = subprocess.Popen(
            container["command"], env={**os.environ, **environment}, text=True, **options
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")
                self.lines.append(f"{now}{len(self.lines) % 1000:03}Z {line}")
        self._process.wait()

    @property
    def code(self) -> int | None:
        """The exit status, or None while it runs."""
        return None if self._reader.is_alive() else self._process.returncode

    def end(self, number: signal.Signals) -> None:
        """Signal the process."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Kill it."""
        self.end(signal.SIGKILL)
        self._reader.join()

    def described(self, job: str) -> Document:
        """Return the pod as Kubernetes shows it."""
        labels = {"jobset.sigs.k8s.io/jobset-name": job, "batch.kubernetes.io/job-completion-index": str(self.index)}
        phase = "Running" if self.code is None else "Failed" if self.code else "Succeeded"
        return {"metadata": {"name": self.name, "uid": self.uid, "labels": labels}, "status": {"phase": phase}}


class Cluster:
    """The created objects, and their pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, str], Document] = {}
        self.pods: dict[str, list[Pod]] = {}
        self.checked: list[str] = []
        self.refused = ""
        """A kind of object that is refused."""

    def create(self, plural: str, document: Document, *, strict: bool) -> Document | None:
        """Create an object. Its job starts when the secret of its pods exists."""
        name = document["metadata"]["name"]
        if document["kind"] == self.refused:
            return None
        if strict:
            self.checked.append(document["kind"])
        document["metadata"]["uid"] = str(uuid.uuid4())
        self.objects[plural, name] = document
        if plural == "secrets":
            secret = self.folder / f"secret-{name}"
            secret.mkdir()
            for key, value in document["stringData"].items():
                (secret / key).write_text(value)
            jobset = self.objects.get(("jobsets", name)) or self.objects["trainingruntimes", name]["spec"]["template"]
            (job,) = jobset["spec"]["replicatedJobs"]
            spec = job["template"]["spec"]
            self.pods[name] = [
                Pod(f"{name}-node-0-{index}-x", index, spec["template"], secret) for index in range(spec["parallelism"])
            ]
        return document

    def patch(self, plural: str, name: str, change: Document) -> Document:
        """Change an object's fields."""
        self.objects[plural, name]["metadata"] |= change["metadata"]
        return self.objects[plural, name]

    def get(self, plural: str, name: str) -> Document | None:
        """Return an object with its status. A deleted one is returned until its pods have ended."""
        if (plural, name) not in self.objects:
            return None
        found, codes = self.objects[plural, name], [pod.code for pod in self.pods.get(name, [])]
        ended = bool(codes) and None not in codes
        if ended and "deletionTimestamp" in found["metadata"]:
            del self.objects[plural, name]
            return None
        kind = {"jobsets": ("Completed", "replicatedJobsStatus"), "trainjobs": ("Complete", "jobsStatus")}[plural]
        condition = {"type": "Failed" if any(codes) else kind[0], "status": "True"}
        return {**found, "status": {kind[1]: [{"active": int(not ended)}], "conditions": [condition] if ended else []}}

    def delete(self, plural: str, name: str) -> Document | None:
        """End the pods of a job."""
        if (plural, name) not in self.objects:
            return None
        self.objects[plural, name]["metadata"]["deletionTimestamp"] = "2026-11-23T00:00:00Z"
        if name not in self.pods:
            return self.objects.pop((plural, name))
        for pod in self.pods.get(name, []):
            pod.end(signal.SIGTERM)
        return self.objects[plural, name]

    def close(self) -> None:
        """Kill all pods."""
        for pods in self.pods.values():
            for pod in pods:
                pod.close()


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            url = urlsplit(self.path)
            query, place = parse_qs(url.query), _OBJECT.match(url.path)
            assert place is not None, self.path
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            if self.headers["Authorization"] != f"Bearer {_TOKEN}":
                self._send(401, {})
            elif place["plural"] == "pods":
                self._answer_of_pods(place["name"], query)
            else:
                found = self._of_objects(place["plural"], place["name"], body, query)
                self._send(404 if found is None else 201 if self.command == "POST" else 200, found or {})

        def _of_objects(self, plural: str, name: str, body: Any, query: dict[str, list[str]]) -> Document | None:
            if self.command == "POST":
                return cluster.create(plural, body, strict=query.get("fieldValidation") == ["Strict"])
            if self.command == "PATCH":
                return cluster.patch(plural, name, body)
            return cluster.delete(plural, name) if self.command == "DELETE" else cluster.get(plural, name)

        def _answer_of_pods(self, name: str | None, query: dict[str, list[str]]) -> None:
            if name is None:
                (selector,) = query["labelSelector"]
                job = selector.partition("=")[2]
                self._send(200, {"kind": "PodList", "items": [pod.described(job) for pod in cluster.pods.get(job, [])]})
            else:
                (pod,) = [pod for pods in cluster.pods.values() for pod in pods if pod.name == name]
                self._send(200, "".join(pod.lines))

        def _send(self, status: int, answer: Document | str) -> None:
            text = answer if isinstance(answer, str) else json.dumps(answer)
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Write nothing."""

        do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 - names of the base class

    return Handler


def use_configuration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the client read this kubeconfig. It reads the variable KUBECONFIG once, at its import."""
    monkeypatch.setattr("kubernetes.config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))


@contextmanager
def kubernetes_api(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield a running API server, and set a kubeconfig for it."""
    cluster = Cluster(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(cluster)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        configuration = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "test", "user": {"token": _TOKEN}}],
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(configuration))
        use_configuration(folder / "kubeconfig", monkeypatch)
        try:
            yield cluster
        finally:
            cluster.close()
            server.shutdown()
            thread.join()
