"""The workflow on a Slurm cluster: the same digests as on one machine, also where jobs and nodes fail."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkout import TIMEOUT, Checkout
from cluster import NODES, Cluster

# A cluster without accounting; nodes of two CPUs; jobs of seconds, of which a user's profile would not ask so often.
PROFILE = (
    "--workflow-profile", "profiles/slurm", "--slurm-status-command", "squeue", "--max-threads", "2",
    "--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "10",
)  # fmt: skip
GOLDEN = "results/demo-llama/fp16/golden/onnxruntime/2.json"
CUDA_ENGINES = "results/demo-llama/fp16/engines/cuda/engines.json"


def test_the_demo_runs_through_the_profile(cluster: Cluster, fresh: Checkout, local: Checkout, tmp_path: Path) -> None:
    """Every stage but the local ones is a job of Slurm's, with the memory and the time that its rule asks for. A second
    checkout finds what the nodes of the first put into the shared cache."""
    cache = f"cache={tmp_path / 'cache'}"
    finish(fresh, "--config", cache)
    assert fresh.digests() == local.digests()
    assert not fresh.would_run("--config", cache), "a machine without Slurm goes on with what the cluster made"
    fresh.call("lockstep", "verify")
    jobs = cluster.finished()
    assert {job["JobState"] for job in jobs} == {"COMPLETED"} and {job["NodeList"] for job in jobs} == set(NODES)
    assert all("mem=" in job["Tres"] and job["TimeLimit"] != "UNLIMITED" for job in jobs)

    second = Checkout.make(tmp_path / "second", {**fresh.variables, "PYTHONPATH": path_of(fresh, tmp_path / "second")})
    second.take_whole_demo()
    finish(second, "--config", cache, "--", GOLDEN)
    logs = [log for log in second.results.rglob("*.log") if "is taken from" in log.read_text()]
    assert {log.relative_to(second.results / "logs").parts[0] for log in logs} == {"export", "build", "reference"}
    check_made(second, local)


def test_a_job_waits_for_the_declared_gpu(cluster: Cluster, fresh: Checkout, local: Checkout) -> None:
    """node1 has the cluster's only GPU, and somebody else has it. The partition is chosen by the job's backend."""
    partition = "slurm_partition='gpu' if wildcards.get('backend') == 'cuda' else 'main'"
    other = cluster.run("sbatch", "--parsable", "--gpus=1", "--output=/dev/null", "--wrap=sleep 600").strip()
    options = ("--set-resources", "build:gpu=1", "--default-resources", partition)
    with started(fresh, *options, "--", CUDA_ENGINES) as run:
        cluster.wait_for(lambda: job_of(cluster, "build", "PENDING"), "the build to be queued", TIMEOUT)
        number = job_of(cluster, "build", "PENDING")
        cluster.wait_for(lambda: cluster.jobs("%r", "--jobs", number) == ["Resources"], "Slurm to look at it")
        assert "TresPerJob=gres:gpu:1" in cluster.run("scontrol", "show", "job", number)
        assert "idle" in cluster.nodes().values(), "only the GPU is missing"
        cluster.run("scancel", other)
    assert run.returncode == 0, run.output
    of_run = [job for job in cluster.finished() if int(job["JobId"]) > int(other)]
    (build,) = [job for job in of_run if job["Partition"] == "gpu"]
    assert (build["JobId"], build["JobState"], build["NodeList"]) == (number, "COMPLETED", "node1")
    assert len(of_run) == 3, "architecture, export, build"
    check_made(fresh, local, CUDA_ENGINES)


def test_a_node_drained_in_the_middle_finishes_its_job_and_gets_no_other(
    cluster: Cluster, fresh: Checkout, local: Checkout
) -> None:
    with started(fresh, "--", GOLDEN) as run:
        number = running(cluster, "export")
        (drained,) = cluster.jobs("%N", "--jobs", number)
        cluster.update_node(drained, "drain")
    assert run.returncode == 0, run.output
    jobs = {int(job["JobId"]): job for job in cluster.finished()}
    assert jobs[int(number)]["JobState"] == "COMPLETED" and jobs[int(number)]["NodeList"] == drained
    (last,) = {job["NodeList"] for at, job in jobs.items() if at == max(jobs)}
    assert last != drained and cluster.nodes()[drained] == "drained"
    check_made(fresh, local)


def test_a_node_that_fails_loses_its_job_and_the_run_goes_on(
    cluster: Cluster, fresh: Checkout, local: Checkout
) -> None:
    """Slurm kills the job and starts it again, two minutes later; the attempt before left nothing that is in its
    way."""
    with started(fresh, "--", GOLDEN) as run:
        number = running(cluster, "export")
        (failed,) = cluster.jobs("%N", "--jobs", number)
        cluster.update_node(failed, "down")
    assert run.returncode == 0, run.output
    states = [(job["JobState"], job["NodeList"]) for job in cluster.finished() if job["JobId"] == number]
    assert states[0] == ("NODE_FAIL", failed) and states[-1][0] == "COMPLETED", states
    check_made(fresh, local)


def test_a_rerun_finishes_behind_a_cancelled_job(cluster: Cluster, fresh: Checkout, local: Checkout) -> None:
    with started(fresh, "--retries", "0", "--", GOLDEN) as run:
        cluster.run("scancel", running(cluster, "export"))
    assert run.returncode == 1 and "SLURM status is: 'CANCELLED'" in run.output, run.output
    finish(fresh, "--", GOLDEN)
    check_made(fresh, local)


def test_a_rerun_finishes_behind_a_job_that_exceeded_its_memory(
    cluster: Cluster, fresh: Checkout, local: Checkout
) -> None:
    with started(fresh, "--retries", "0", "--set-resources", "export:mem_mb=250", "--", GOLDEN) as run:
        pass
    assert run.returncode == 1 and re.search(r"export .* FAIL .*\n +SLURM-job '\d+' failed", run.output), run.output
    logs = "".join(path.read_text() for path in (fresh.folder / ".snakemake/slurm_logs/rule_export").rglob("*.log"))
    assert "memory limit" in logs, logs
    finish(fresh, "--", GOLDEN)
    check_made(fresh, local)


def test_a_job_that_exceeded_its_memory_asks_for_more(cluster: Cluster, fresh: Checkout, local: Checkout) -> None:
    """By the retries of the profile: one run."""
    output = finish(fresh, "--set-resources", "export:mem_mb=250 if attempt == 1 else 4000", "--", GOLDEN)
    assert "Trying to restart job" in output
    check_made(fresh, local)


def test_a_mistake_found_by_a_job_is_one_line_and_exit_code_1(cluster: Cluster, fresh: Checkout) -> None:
    (fresh.folder / "resources" / "demo-llama" / "tokenizer.json").write_text("{")
    with started(fresh, "--retries", "0", "--", GOLDEN) as run:
        pass
    assert run.returncode == 1, run.output
    lines = {line.strip() for line in run.output.splitlines() if line.strip().startswith("lockstep: error")}
    assert len(lines) == 1 and "tokenizer.json" in lines.pop(), run.output
    assert "Traceback" not in run.output


class Run:
    """A run of Snakemake: its exit code and all that it said, once it has ended."""

    returncode: int
    output: str


@contextmanager
def started(checkout: Checkout, *arguments: str) -> Iterator[Run]:
    """Snakemake on the cluster while the body runs; after it the run has ended."""
    log = checkout.folder / "run.log"
    run = Run()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "snakemake", *PROFILE, *arguments], cwd=checkout.folder,
            env=checkout.environment(), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield run
            run.returncode = process.wait(timeout=TIMEOUT)
        finally:
            process.kill()
            process.wait()
            run.output = log.read_text()


def finish(checkout: Checkout, *arguments: str) -> str:
    """Run it on the cluster to its end; return its output.

    In its own process: a forked one knows the plugins of the folder that its server was started with.
    """
    with started(checkout, *arguments) as run:
        pass
    assert run.returncode == 0, run.output
    return run.output


def path_of(checkout: Checkout, folder: Path) -> str:
    """The PYTHONPATH of a checkout, for another one in `folder`."""
    return checkout.variables["PYTHONPATH"].replace(str(checkout.folder), str(folder))


def job_of(cluster: Cluster, rule: str, state: str) -> str:
    """The number of the rule's job in the queue in that state; empty where there is none."""
    lines = [line.split() for line in cluster.jobs("%A %T %k")]
    results = [number for number, is_in, comment in lines if is_in == state and comment.startswith(f"rule_{rule}_")]
    return results[0] if results else ""


def running(cluster: Cluster, rule: str) -> str:
    """Wait until the rule's job runs; gives its number."""
    cluster.wait_for(lambda: job_of(cluster, rule, "RUNNING"), f"{rule} to run", TIMEOUT)
    return job_of(cluster, rule, "RUNNING")


def check_made(checkout: Checkout, local: Checkout, target: str = GOLDEN) -> None:
    """Artefacts equal those of a machine without Slurm, to the byte, and nothing else is left."""
    digests = checkout.digests()
    expected = local.digests()
    assert target.removeprefix("results/") in digests
    assert digests == {name: digest for name, digest in expected.items() if name in digests}
    assert not [path for path in checkout.results.rglob("*") if path.name.endswith(".tmp")]
    assert not checkout.would_run(target)
    checkout.call("lockstep", "verify")
