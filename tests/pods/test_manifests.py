"""The manifests against Kubernetes' own schemas, each as `kubectl apply -k` would send it; and examples/compose.yaml
against Compose's."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
MANIFESTS = REPOSITORY / "resources" / "kubernetes"
VERSIONS = ["1.30", "1.37"]
# Of the Prometheus operator and of KServe: Kubernetes has no schema of them.
ELSEWHERE = {"ServiceMonitor", "ServingRuntime", "InferenceService"}
NOT_SENT = {"kustomization.yaml", "prometheus-adapter.yaml", "gpu.yaml"}  # kustomize's, a chart's values, a patch
FILES = sorted(path for path in MANIFESTS.rglob("*.yaml") if path.name not in NOT_SENT)
KUSTOMIZED = sorted(path.parent for path in MANIFESTS.rglob("kustomization.yaml"))


def validate(documents: Any, version: str) -> list[str]:
    """Check objects of Kubernetes itself, with unknown fields as errors; return the kinds that were checked."""
    checked = [document for document in documents if document["kind"] not in ELSEWHERE]
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)
    return [document["kind"] for document in checked]


def kustomize(folder: Path) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, for kustomize")
    built = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return list(yaml.safe_load_all(built.stdout))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(MANIFESTS).as_posix())
def test_a_file_is_valid(path: Path, version: str) -> None:
    validate(yaml.safe_load_all(path.read_text()), version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", KUSTOMIZED, ids=lambda folder: folder.name)
def test_what_kustomize_makes_is_valid(folder: Path, version: str) -> None:
    documents = kustomize(folder)
    assert len(validate(documents, version)) >= 3
    images = set()
    for document in documents:
        if document["kind"] in ("Deployment", "Job"):
            images |= {container["image"] for container in document["spec"]["template"]["spec"]["containers"]}
    assert all(image.endswith(":0.3.0") for image in images) and images


def test_the_compose_file_is_valid_and_a_misspelt_one_is_not() -> None:
    package = importlib.util.find_spec("check_jsonschema")  # not imported, for its dependencies are not installed
    assert package is not None and package.origin is not None
    schema = json.loads((Path(package.origin).parent / "builtin_schemas/vendor/compose-spec.json").read_text())
    compose = yaml.safe_load((REPOSITORY / "examples" / "compose.yaml").read_text())
    jsonschema.validate(compose, schema)
    compose["services"]["server"]["helthcheck"] = {}
    with pytest.raises(jsonschema.ValidationError, match="helthcheck"):
        jsonschema.validate(compose, schema)


def change(path: str, value: Any) -> Callable[[Any], None]:
    def changed(document: Any) -> None:
        *folders, name = path.split(".")
        for folder in folders:
            document = document[int(folder)] if folder.isdigit() else document[folder]
        document[name] = value

    return changed


@pytest.mark.parametrize(
    "mistake",
    [
        change("spec.replica", 2),
        change("spec.selector", {"matchLabel": {"a": "b"}}),
        change("spec.template.spec.containers.0.readinessProbe.httpGet", {"path": "/health/ready"}),
        change("spec.template.spec.terminationGracePeriodSeconds", "60s"),
        change("apiVersion", "apps/v1beta1"),
    ],
    ids=["unknown-field", "wrong-selector", "no-port", "wrong-type", "old-version"],
)
def test_a_mistake_is_seen(mistake: Callable[[Any], None]) -> None:
    document = yaml.safe_load((MANIFESTS / "server" / "deployment.yaml").read_text())
    mistake(document)
    with pytest.raises((kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)):
        validate([document], VERSIONS[-1])


def test_a_gpu_has_an_equal_limit() -> None:
    """Kubernetes refuses a device that is requested without one; no schema says so."""
    (deployment,) = [document for document in kustomize(MANIFESTS / "server-gpu") if document["kind"] == "Deployment"]
    resources = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 1
