"""A stand-in for a Kubernetes cluster of one node: the calls of Snakemake's plugin over HTTP, each pod a process.

Objects are checked as an API server checks them: against Kubernetes' own schemas, and that a device is requested with
an equal limit. A pod's container runs its command in its own folder (the `emptyDir`) with the environment that it
names and that of its "image", which is this machine. A claim is a folder that must be mounted at its own path.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

VERSION = "1.32"  # of the schemas
Answer = tuple[int, Any]


@dataclass
class Pod:
    """A job's only pod. process: of its container. claims: where it mounts which."""

    job: dict[str, Any]
    process: subprocess.Popen
    log: Path
    claims: Mapping[str, str]

    def container(self) -> dict[str, Any]:
        return self.job["spec"]["template"]["spec"]["containers"][0]

    def as_json(self) -> dict[str, Any]:
        code = self.process.poll()
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        container = self.container()
        return {
            "metadata": {"name": f"{self.job['metadata']['name']}-pod"},
            "spec": self.job["spec"]["template"]["spec"],
            "status": {
                "containerStatuses": [
                    {"name": container["name"], "image": container["image"], "imageID": "", "ready": code is None,
                     "restartCount": 0, "state": state}
                ]
            },
        }  # fmt: skip

    def job_as_json(self) -> dict[str, Any]:
        code = self.process.poll()
        count = {} if code is None else {"succeeded": 1} if code == 0 else {"failed": 1}
        return {**self.job, "status": count}

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class PodServer:
    """Use as a context. claims: folders by the claim's name. image: environment variables of the image.

    jobs: all that were ever created. refused: messages of rejected requests. calls: resources and verbs of all
    calls, as a Role names them.
    """

    folder: Path
    claims: Mapping[str, Path]
    image: Mapping[str, str]
    jobs: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    calls: set[tuple[str, str]] = field(default_factory=set)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> PodServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                url = urlsplit(self.path)
                with owner.lock:
                    status, value = owner.call(self.command, url.path, parse_qs(url.query), json.loads(body or b"{}"))
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(value, bytes) else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "here"}}],
                    "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self._http.server_port}"}}],
                    "users": [{"name": "here", "user": {}}],
                }
            )
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        for pod in self.pods.values():
            pod.end()

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def call(self, method: str, path: str, query: Mapping[str, list[str]], body: dict[str, Any]) -> Answer:
        """One call of the API: status, and JSON or text."""
        match = re.fullmatch(r"/(?:api|apis/batch)/v1/namespaces/default/(secrets|jobs|pods)(?:/([^/]+))?(/.+)?", path)
        if match is None:
            return self._refuse(404, f"{method} {path}: no such thing here")
        kind, name, part = match.groups()
        verb = {"POST": "create", "DELETE": "delete", "GET": "get" if name else "list"}[method]
        self.calls.add((f"{kind}{part or ''}", verb))
        if method == "POST":
            return self._make(kind, body)
        if kind == "secrets":
            return (200, {}) if self.secrets.pop(name, None) is not None else self._not_found(name)
        if kind == "pods" and name is None:
            job_name = query["labelSelector"][0].removeprefix("job-name=")
            return 200, {"items": [pod.as_json() for job, pod in self.pods.items() if job == job_name]}
        pod = self.pods.get(name.removesuffix("-pod"))
        if pod is None:
            return self._not_found(name)
        if part == "/log":
            if query.get("previous") == ["True"]:
                # As an API server answers: a container that was never restarted has no earlier log.
                return self._refuse(400, f'previous terminated container "snakemake" in pod "{name}" not found')
            return 200, pod.log.read_bytes()
        if method == "DELETE":
            pod.end()
            if kind == "jobs":
                del self.pods[name]
            return 200, {}
        return 200, pod.job_as_json()

    def _make(self, kind: str, body: dict[str, Any]) -> Answer:
        named = {"secrets": ("v1", "Secret"), "jobs": ("batch/v1", "Job")}[kind]
        body = {**body, "apiVersion": named[0], "kind": named[1]}
        try:
            kubernetes_validate.validate(body, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return self._refuse(422, str(error))
        name = body["metadata"]["name"]
        if kind == "secrets":
            self.secrets[name] = {key: base64.b64decode(value).decode() for key, value in body["data"].items()}
            return 201, body
        resources = body["spec"]["template"]["spec"]["containers"][0]["resources"]
        for device, count in resources["requests"].items():
            if "/" in device and resources.get("limits", {}).get(device) != count:
                return self._refuse(422, f"{device}: limit must be set for non overcommitable resources")
        self.jobs.append(body)
        self.pods[name] = self._start(body)
        return 201, body

    def _start(self, job: dict[str, Any]) -> Pod:
        spec = job["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        empty = tempfile.mkdtemp(dir=self.folder)
        names = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in spec["volumes"]}
        claims = {}
        for mount in container["volumeMounts"]:
            claim = names[mount["name"]]
            if claim is not None:
                assert str(self.claims[claim]) == mount["mountPath"], "nothing is mounted here"
                claims[claim] = mount["mountPath"]
        container_state = {
            entry["name"]: self.secrets[entry["valueFrom"]["secretKeyRef"]["name"]][
                entry["valueFrom"]["secretKeyRef"]["key"]
            ]
            for entry in container["env"]
        }
        log = Path(empty, "log")
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*container["command"], *container["args"]], cwd=empty, env={**self.image, **container_state},
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Pod(job, process, log, claims)

    def _not_found(self, name: str) -> Answer:
        return self._refuse(404, f"{name} not found")

    def _refuse(self, code: int, message: str) -> Answer:
        self.refused.append(message)
        return code, {"kind": "Status", "status": "Failure", "message": message, "code": code}
