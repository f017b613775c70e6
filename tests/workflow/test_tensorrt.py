"""TensorRT targets without a GPU: a device's are planned, others are neither built nor run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
from checkout import Checkout


def with_tensorrt(config: dict[str, Any]) -> None:
    config["models"]["demo-llama"] |= {"backends": ["onnxruntime", "tensorrt"]}


def with_device(config: dict[str, Any]) -> None:
    config["devices"] = {"h200": {"backend": "tensorrt", "gpu": "NVIDIA H200"}}
    config["models"]["demo-llama"] |= {"backends": ["onnxruntime", "h200"]}


@pytest.fixture
def installed(demo: Checkout) -> Checkout:
    """Return the finished run where a package `tensorrt` is installed, as on a cluster's login node without a GPU."""
    package = demo.folder / "site" / "tensorrt"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise ImportError("a plan imports no TensorRT")\n')
    path = f"{demo.folder / 'src'}:{package.parent}"
    installed = Checkout(demo.folder, {"PYTHONPATH": path})
    return installed


def test_the_dag_is_planned_without_a_gpu(installed: Checkout) -> None:
    installed.edit_config(with_tensorrt)
    jobs = installed.would_run()
    assert "build" not in jobs and "golden" not in jobs
    installed.edit_config(with_device)
    jobs = installed.would_run()
    assert jobs["build"] == 1 and jobs["compare"] == 1 and jobs["golden"] == 2 and "export" not in jobs
    assert "validate" not in jobs


RESOURCES = """
import sys
from snakemake.api import DAGSettings, OutputSettings, ResourceSettings, SnakemakeApi
from snakemake.resources import ResourceScopes
limits, scope = eval(sys.argv[1]), ResourceScopes.defaults()
scope.update({"gpu": sys.argv[2]})
with SnakemakeApi(OutputSettings(quiet=["all"])) as api:
    workflow = api.workflow(ResourceSettings(cores=1, resources=limits, overwrite_resource_scopes=scope))
    workflow.dag(DAGSettings(forceall=True)).execute_workflow(executor="dryrun")
    for job in workflow._workflow.dag.jobs:
        print(job.rule.name, job.wildcards_dict.get("backend"), job.resources.get("gpu"))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("limits", "scope", "gpus"),
    [pytest.param("{}", "local", "2", id="a cluster"), pytest.param("{'gpu': 1}", "global", "1", id="this machine")],
)
def test_jobs_of_several_ranks_ask_for_as_many_gpus(installed: Checkout, limits: str, scope: str, gpus: str) -> None:
    """Those that run the model; engines are built and compared on one. On a machine where one such job runs at a time
    it takes what there is."""
    installed.edit_config(with_device)
    installed.edit_config(lambda config: config["models"]["demo-llama"].update(tensor_parallel=2))
    command = [sys.executable, "-c", RESOURCES, limits, scope]
    done = subprocess.run(
        command, cwd=installed.folder, env=installed.environment(), text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    jobs = {(rule, gpu) for rule, backend, gpu in map(str.split, done.stdout.splitlines()) if backend == "h200"}
    assert jobs == {("build", "1"), ("compare", "1"), ("golden", gpus), ("served", gpus)}


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
def test_what_is_missing_is_said_before_any_job(demo: Checkout) -> None:
    """Not after minutes of export."""
    demo.edit_config(with_tensorrt)
    demo.edit_config(lambda config: config.update(skip_missing_backends=False))
    process = demo.snakemake("-n", check=False)
    assert process.returncode
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("lockstep: error: ")]
    assert "models.demo-llama.backends[1]: expected backends that are installed" in line
    assert 'tensorrt: the Python package tensorrt is not installed for this Python: pip install ".[tensorrt]"' in line
    demo.edit_config(lambda config: config.update(skip_missing_backends=True))
    output = demo.snakemake("-n")
    assert "Left out: the targets of tensorrt, for " in output.stdout + output.stderr
