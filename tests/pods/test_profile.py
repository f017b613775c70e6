"""The profile of Kubernetes: the real plugin, against a stand-in for the API; pods are processes."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkout import TIMEOUT, Checkout, failure
from pod_server import PodServer

PACKAGES = os.environ["LOCKSTEP_KUBERNETES"]
MANIFESTS = Path(__file__).parents[2] / "resources" / "kubernetes"


class Cluster:
    """A claim with a checkout on it, and the stand-in. The head of a run has another home folder than its pods."""

    def __init__(self, folder: Path) -> None:
        self.claim = folder / "claim"
        self.checkout = Checkout.make(self.claim / "lockstep")
        self.checkout.edit_config(smallest)
        profile = self.checkout.folder / "profiles" / "kubernetes" / "config.yaml"
        text = profile.read_text()
        assert "lockstep:/lockstep" in text
        # Nothing can be mounted here: a pod finds the claim where it is.
        profile.write_text(text.replace("lockstep:/lockstep", f"lockstep:{self.claim}"))
        self.folder = folder
        packages = os.pathsep.join((str(self.checkout.folder / "src"), PACKAGES))
        environment = {name: value for name, value in os.environ.items() if name in ("PATH", "TMPDIR", "LANG")}
        self.image = {**environment, "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
        (folder / "home").mkdir()
        self.server = PodServer(folder / "node", {"lockstep": self.claim}, {**self.image, "HOME": str(folder / "node")})

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        variables = {"HOME": str(self.folder / "home"), "KUBECONFIG": str(self.server.kubeconfig)}
        return subprocess.run(
            [sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/kubernetes",
             "--seconds-between-status-checks", "1", *arguments],
            cwd=self.checkout.folder, env={**self.image, **variables}, stdin=subprocess.DEVNULL,
            text=True, capture_output=True, timeout=TIMEOUT,
        )  # fmt: skip

    def rules(self) -> list[str]:
        """The rule of each job that a pod was made for."""
        return [re.findall(r"--allowed-rules (\w+)", container(job)["args"][1])[0] for job in self.server.jobs]


# All but what runs where Snakemake runs: config, summary.
IN_PODS = sorted(
    ["resolve", "architecture", "convert", "export", "reference", "build", "validate", "compare", "golden", "served"]
)


def smallest(config: Any) -> None:
    model = config["models"]["demo-llama"]
    model.update(layers=[2], precisions=["fp32"])
    for prompt in model["golden"]["prompts"]:
        del prompt["expected"]["all"]


def container(job: Any) -> Any:
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return only


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    one_cluster = Cluster(tmp_path)
    with one_cluster.server:
        yield one_cluster


def test_a_run_ends_as_one_without_a_cluster(cluster: Cluster) -> None:
    """Every stage's files reach the next stage's pod, also those that no rule names; a second run has nothing to do."""
    ran = cluster.run("--config", f"cache={cluster.claim / 'cache'}")
    assert ran.returncode == 0, failure(ran)
    assert sorted(cluster.rules()) == IN_PODS
    assert cluster.server.refused == [] and cluster.server.secrets == {} and cluster.server.pods == {}
    assert "demo-llama,2,fp32,onnxruntime,pass," in (cluster.checkout.results / "summary.csv").read_text()
    assert "Nothing to be done" in (again := cluster.run()).stdout + again.stderr

    alone = Checkout.make(cluster.folder / "alone", {"LOCKSTEP_CACHE": str(cluster.claim / "cache")})
    alone.edit_config(smallest)
    result = alone.snakemake("--cores", "2")
    logs = "".join(path.read_text() for path in alone.results.glob("logs/**/*.log"))
    assert logs.count("is taken from") == 4, result.stderr  # convert, export, build, reference
    digests = alone.digests()
    assert {name: digest for name, digest in cluster.checkout.digests().items() if name in digests} == digests


def test_each_pod_asks_for_what_its_job_takes(cluster: Cluster) -> None:
    """Limits next to requests, no GPU for a backend without one, and at most the CPUs that the profile allows."""
    ran = cluster.run("--until", "build")
    assert ran.returncode == 0, failure(ran)
    resources = dict(zip(cluster.rules(), [container(job)["resources"] for job in cluster.server.jobs]))
    assert resources["build"]["limits"]["nvidia.com/gpu"] == resources["build"]["requests"]["nvidia.com/gpu"] == "0"
    for request in resources.values():
        assert request["limits"]["memory"] == request["requests"]["memory"]
        assert int(request["limits"]["cpu"].removesuffix("m")) <= 8000


def test_the_line_of_a_job_that_failed_reaches_the_user(cluster: Cluster) -> None:
    """As without a cluster, with its exit code: 1 for a check that failed, 2 for a mistake of the user."""

    def expect_another_text(config: Any) -> None:
        config["models"]["demo-llama"]["golden"]["prompts"][0]["expected"] = {2: "no such text"}

    cluster.checkout.edit_config(expect_another_text)
    ran = cluster.run()
    output = ran.stdout + ran.stderr
    assert ran.returncode == 1 and "Traceback" not in output, failure(ran)
    assert "lockstep: error: prompt 'San Francisco is a', text: expected 'no such text'" in output


def test_a_mistake_of_the_user_ends_with_its_line_and_exit_code_1(cluster: Cluster) -> None:
    """And the run has called nothing that the Role of the manifests does not allow, which allows nothing else."""
    cluster.checkout.append("resources/demo-llama/tokenizer.json", "}")
    ran = cluster.run()
    output = ran.stdout + ran.stderr
    assert ran.returncode == 1 and "Traceback" not in output, failure(ran)
    assert "lockstep: error: resources/demo-llama/tokenizer.json" in output
    parts = yaml.safe_load_all((MANIFESTS / "workflow" / "rights.yaml").read_text())
    (role,) = [part for part in parts if part["kind"] == "Role"]
    allowed: set[tuple[str, str]] = set()
    for rule in role["rules"]:
        allowed |= {*itertools.product(rule["resources"], rule["verbs"])}
    assert cluster.server.calls == allowed


def test_without_the_plugin_one_line_says_what_to_install(cluster: Cluster) -> None:
    cluster.image["PYTHONPATH"] = str(cluster.checkout.folder / "src")
    ran = cluster.run("--dry-run")
    *_, line = ran.stderr.strip().splitlines()
    assert ran.returncode == 2 and "Traceback" not in ran.stderr, failure(ran)
    assert line.endswith("found none; run: pip install snakemake-executor-plugin-kubernetes")
