"""The manifests of resources/kubernetes and the image, held against the real server and the pins."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from demo_model import LIMITS
from recorded import recorded

from lockstep.bundle.pack import pack
from lockstep.targets import Results, Target
from lockstep_serve.cli.serve import serve
from real_server import RealServer

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "resources" / "kubernetes"


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / path).read_text()))


def options(args: list[str]) -> dict[str, str]:
    """The options of `serve` in a container's args, {name: value}."""
    command, bundle, *extra_args = args
    assert command == "serve" and bundle.endswith(".tar")
    return dict(argument.split("=", 1) for argument in extra_args)


DEPLOYMENT = documents("server/deployment.yaml")[0]["spec"]["template"]["spec"]
(SERVER,) = DEPLOYMENT["containers"]
(GPU_SERVER,) = documents("server-gpu/gpu.yaml")[0]["spec"]["template"]["spec"]["containers"]
RUNTIME = documents("kserve/runtime.yaml")[0]["spec"]
(KSERVE_SERVER,) = RUNTIME["containers"]
KEY = "sk-manifests"


@pytest.fixture(scope="module")
def server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Started with the manifest's own options, but for where files and ports are and how much memory it takes."""
    folder = tmp_path_factory.mktemp("kubernetes")
    target = Target("demo-llama", "fp16", "all", "onnxruntime")
    bundle = pack(recorded(demo, folder / "recorded"), target, LIMITS, folder / "model.tar", with_weights=True)
    (folder / "keys").write_text(f"{KEY}\n")
    replaced = {"--api-key-file": folder / "keys", "--host": "127.0.0.1", "--port": 0}
    arguments = options(SERVER["args"]) | replaced | {"--kv-bytes": "64M"}
    with RealServer(folder, *(f"{name}={value}" for name, value in arguments.items()), target=str(bundle)) as server:
        yield server


@pytest.mark.parametrize("container", [SERVER, GPU_SERVER, KSERVE_SERVER], ids=["cpu", "gpu", "kserve"])
def test_every_option_is_one_that_serve_takes(container: dict[str, Any]) -> None:
    serve_options = itertools.chain.from_iterable(parameter.opts for parameter in serve.params)
    assert set(options(container["args"])) <= {*serve_options}


def test_kserve_starts_what_the_deployment_starts() -> None:
    """From where KServe puts a model, without keys, at the port that it expects."""
    defaults = {"--port": "8080", "--api-key-file": None}
    expected = {name: defaults.get(name, value) for name, value in options(SERVER["args"]).items()}
    assert options(KSERVE_SERVER["args"]) == {name: value for name, value in expected.items() if value}
    assert KSERVE_SERVER["args"][1].startswith("/mnt/models/")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        theirs = {**KSERVE_SERVER[probe], "httpGet": {**KSERVE_SERVER[probe]["httpGet"], "port": "http"}}
        assert theirs == SERVER[probe]
    (service,) = documents("kserve/service.yaml")
    model = service["spec"]["predictor"]["model"]
    (model_format,) = RUNTIME["supportedModelFormats"]
    assert (
        model["modelFormat"]["name"] == model_format["name"] and model["protocolVersion"] in RUNTIME["protocolVersions"]
    )
    assert KSERVE_SERVER["resources"] == SERVER["resources"]


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_answer_without_a_key(server: RealServer, probe: str) -> None:
    path = SERVER[probe]["httpGet"]["path"]
    status, _, body = server.request("GET", path)
    assert (status, yaml.safe_load(body)["live"]) == (200, True)


def test_readiness_and_liveness_ask_for_different_things() -> None:
    """A pod that is not ready gets no requests; only one that is not live is ended."""
    paths = [SERVER[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe", "startupProbe")]
    assert paths == ["/health/ready", "/health/live", "/health/live"]


def test_the_port_is_the_one_that_the_service_and_the_monitor_name() -> None:
    (port,) = SERVER["ports"]
    assert str(port["containerPort"]) == options(SERVER["args"])["--port"]
    (service,) = documents("server/service.yaml")[0]["spec"]["ports"]
    (endpoint,) = documents("server-autoscaling/monitor.yaml")[0]["spec"]["endpoints"]
    assert service["targetPort"] == port["name"] and endpoint["port"] == service["name"]
    assert {SERVER[probe]["httpGet"]["port"] for probe in SERVER if probe.endswith("Probe")} == {port["name"]}


def test_the_autoscaler_asks_for_a_series_of_the_server(server: RealServer) -> None:
    (metric,) = documents("server-autoscaling/autoscaler.yaml")[0]["spec"]["metrics"]
    (rule,) = documents("server-autoscaling/prometheus-adapter.yaml")[0]["rules"]["custom"]
    match = re.search(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert match is not None
    # prometheus-adapter's groups are Go's: $1.
    renamed = re.sub(rule["name"]["matches"], rule["name"]["as"].replace("$", "\\"), match[1])
    assert renamed == metric["pods"]["metric"]["name"]
    path = documents("server-autoscaling/monitor.yaml")[0]["spec"]["endpoints"][0]["path"]
    status, _, text = server.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
    assert status == 200 and re.search(rf"^{match[1]}\{{model_name=.*\}} 0", text.decode(), re.MULTILINE)
    assert server.request("GET", path)[0] == 401  # so the monitor brings a key


def test_a_request_is_answered_with_a_key_of_the_secret(server: RealServer) -> None:
    body = {"model": "demo-llama", "prompt": "San Francisco is a", "max_tokens": 4, "temperature": 0}
    assert server.request("POST", "/v1/completions", body)[0] == 401
    assert server.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"})[0] == 200


def test_kubernetes_kills_after_the_drain_has_ended() -> None:
    (drain,) = [parameter for parameter in serve.params if "--drain" in parameter.opts]
    assert isinstance(drain, click.Option)
    before = float(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    for container in (SERVER, GPU_SERVER):
        longest = max(float(options(container["args"])["--drain"]), float(drain.default))
        assert DEPLOYMENT["terminationGracePeriodSeconds"] >= before + longest + 20


def test_every_path_in_the_options_is_mounted() -> None:
    mounts = [mount["mountPath"] for mount in SERVER["volumeMounts"]]
    _, bundle, *_ = SERVER["args"]
    for path in map(Path, (bundle, options(SERVER["args"])["--api-key-file"])):
        assert any(path.is_relative_to(mount) for mount in mounts), path
    assert {mount["name"] for mount in SERVER["volumeMounts"]} == {volume["name"] for volume in DEPLOYMENT["volumes"]}
    writable = [mount["mountPath"] for mount in SERVER["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["/tmp"] and SERVER["securityContext"]["readOnlyRootFilesystem"]


def test_images_and_actions_are_named_by_digest() -> None:
    """A tag can be moved. The project's own image is built from the checkout."""
    compose = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text())["services"]
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    images = [base, *(service["image"] for service in compose.values())]
    foreign = [image for image in images if not image.startswith("lockstep:")]
    assert len(foreign) == 3 and all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in foreign)
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert [name for _, name in stages][-2:] == ["cuda", "cpu"], "the last one is built without --target"
    assert {origin for origin, _ in stages} == {"${BASE}", "builder", "runtime"}
    workflows = [*(ROOT / ".github" / "workflows").glob("*.yml"), *(ROOT / "examples" / "ci").glob("*.yml")]
    assert workflows
    for path in workflows:
        uses = re.findall(r"uses: (.+)$", path.read_text(), re.MULTILINE)
        assert uses and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line) for line in uses)
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                if "actions/checkout" in step.get("uses", ""):
                    assert step["with"]["persist-credentials"] is False, path


def test_the_user_is_the_image_s() -> None:
    (user,) = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    run = documents("workflow/run.yaml")[0]["spec"]["template"]["spec"]
    for spec in (DEPLOYMENT, run):
        context = spec["securityContext"]
        assert (str(context["runAsUser"]), str(context["runAsGroup"])) == user and str(context["fsGroup"]) == user[1]


def test_the_image_has_what_the_workflow_reads() -> None:
    """All that .dockerignore lets through is there, and the profile that a run names is among it."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert {"Snakefile", "workflow", "src", "envs", "config", "profiles", "resources", "pyproject.toml"} <= copied
    (container,) = documents("workflow/run.yaml")[0]["spec"]["template"]["spec"]["containers"]
    for path in re.findall(r"/opt/lockstep/(\S+)", container["args"][0]):
        assert (ROOT / path).exists() and path.split("/")[0] in copied
