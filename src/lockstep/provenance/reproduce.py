"""Build a target again in an empty folder, by new processes, and compare it with a lock.

A config, a checkpoint and a lock in; for each artefact the first difference out. A finished target is compared with its
own results.

A round is a run of the workflow in an empty results tree, from the checkpoint's own files. It reuses the reference of a
finished target, which transformers computed, and the tactics that its engines were built with. No cache of artefacts is
used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import processes
from lockstep.artifacts import formats
from lockstep.artifacts.checkpoint import RESOLVE_AGAIN, CheckpointManifest
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import read_json, write_json
from lockstep.artifacts.statement import SUFFIX
from lockstep.artifacts.summary import Reproduction
from lockstep.backends.cpu import THREADS_VARIABLE
from lockstep.config.load import load
from lockstep.config.sources import REPOSITORY
from lockstep.errors import PREFIX, CheckError, note
from lockstep.manifests.digest_cache import check_files, check_stored
from lockstep.manifests.manifest_files import failed_path, named_files
from lockstep.provenance.cache import VARIABLE
from lockstep.provenance.lock import PARAMETERS, Lock, lock_entries, lock_of, readable_entries
from lockstep.provenance.locked import difference
from lockstep.provenance.varied import UNVARIED, Surroundings, varied_surroundings
from lockstep.stages import STAGES, jobs
from lockstep.targets import Results, Target, is_quantized

if TYPE_CHECKING:
    from lockstep.config.schema import Config


def reproduce(
    config: Mapping[str, Any], results: Results, target: Target, rounds: int, vary: bool = False
) -> Reproduction:
    """Build `target` again `rounds` times, compare it, and write and return the result (`results.reproduction`).

    config: of the results. vary: each round has another environment. Raises InputError where the target is not
    finished, CheckError where it cannot be built again.
    """
    engines_json = results.engines(target.model, target.precision, target.backend)
    engines = EngineSetManifest.load(engines_json)
    assert engines.digest is not None  # of a set that was built
    check_files(named_files(engines_json), "run `lockstep run` first")
    manifest_path = results.checkpoint(target.model)
    manifest = CheckpointManifest.load(manifest_path)
    checkpoint = manifest.folder_of(manifest_path)
    check_stored(manifest.files, checkpoint, RESOLVE_AGAIN)
    lock = lock_of(target.model, readable_entries(results.root / target.model).values())
    artefacts: dict[str, str | None] = {}
    same_rounds = 0
    for number in range(1, rounds + 1):
        note(f"round {number} of {rounds}")
        surroundings = varied_surroundings(number) if vary else UNVARIED
        rebuilt = rebuild(config, checkpoint, target, lock, results, surroundings)
        for comparison in rebuilt:
            artefacts[comparison.where] = artefacts.get(comparison.where) or comparison.differs
        same_rounds += not any(comparison.differs for comparison in rebuilt)
    record = Reproduction(
        target=target,
        engine_digest=engines.digest,
        backend_version=engines.backend_version,
        device=engines.device,
        rounds=rounds,
        same_rounds=same_rounds,
        artefacts=artefacts,
    )
    record.save(results.reproduction(target.model, target.precision, target.layers, target.backend))
    return record


@dataclass(frozen=True)
class LockComparison:
    """An artefact compared with a lock.

    where: its place there. differs: the first difference, or None. is_locked: whether the lock has its place; a lock of
    another device has none for these engines. items: {name: rebuilt value}.
    """

    where: str
    is_locked: bool
    differs: str | None
    items: Mapping[str, Any]


def rebuild(
    config: Mapping[str, Any],
    checkpoint: Path,
    target: Target,
    lock: Lock,
    finished: Results | None = None,
    surroundings: Surroundings = UNVARIED,
) -> list[LockComparison]:
    """Build and check `target` once in an empty folder, and compare each artefact with a lock.

    The lock may be another machine's. Resolves, converts, exports, builds, and checks where its engines run; the
    target's own results are not needed, and not touched. checkpoint: the folder of its checkpoint. finished: results
    whose reference and record of tactics are reused; without them the reference is made again too.

    Raises CheckError where the target cannot be built.
    """
    is_run = load(config).is_run(target)
    with tempfile.TemporaryDirectory(prefix="lockstep-reproduce-") as empty:
        folder = Path(empty, surroundings.folder)
        folder.mkdir(parents=True, exist_ok=True)
        tree = Results(folder / "results")
        # The reference of quantised weights is made from them, so it is part of the round.
        if finished and is_run and not is_quantized(target.precision):
            _link_reference(finished, tree, target)
        if finished:
            _copy_tactics(finished, tree, target)
        failure = run_workflow(config, checkpoint, target, folder, is_run, surroundings)
        compared = [
            LockComparison(entry.where, entry.where in lock.entries, difference(lock, entry), entry.items)
            for entry in lock_entries(tree.root, target.model)
            if not entry.where.startswith(f"{PARAMETERS}/")
        ]
    if failure:
        compared.append(LockComparison("golden check", True, failure, {}))
    return compared


def run_workflow(
    config: Mapping[str, Any], checkpoint: Path, target: Target, folder: Path, is_run: bool, surroundings: Surroundings
) -> str | None:
    """Run the workflow for the target in `folder`, with a reference that is in its results.

    checkpoint: its folder. is_run: the engines run here, so that they are checked. Returns the golden check's error,
    None where it passed. Raises CheckError for another stage that fails.
    """
    tree = Results(folder / "results")
    only = _config_of_target(config, checkpoint, target)
    write_json(folder / "config.json", only)
    files = [tree.weights(target.model, target.precision), tree.engines(target.model, target.precision, target.backend)]
    golden = tree.golden(target.model, target.precision, target.layers, target.backend)
    if is_run:
        files.append(golden)
    rules = list(STAGES)
    if tree.reference(target.model, target.layers).is_file():
        rules.remove("reference")  # without its rule Snakemake takes the file as it is
    environment = {**processes.environment(), **surroundings.variables}
    # An artefact from a cache would not be rebuilt.
    environment.pop(VARIABLE, None)
    # Snakemake needs a cache folder, and a round's HOME may not have one.
    environment["XDG_CACHE_HOME"] = str(folder / ".cache")
    process = processes.run(
        [
            *(sys.executable, "-m", "snakemake", "--snakefile", str(REPOSITORY / "Snakefile")),
            *("--configfile", "config.json", "--cores", surroundings.variables.get(THREADS_VARIABLE, "all")),
            *("--allowed-rules", *rules, "--", *(str(path.relative_to(folder)) for path in files)),
        ],
        # To stderr: with --json, stdout holds one document only.
        env=environment, cwd=folder, umask=surroundings.umask, stdin=subprocess.DEVNULL, stdout=2,
    )  # fmt: skip
    if not process.returncode:
        return None
    if failed_path(golden).is_file() and read_json(failed_path(golden)).get("format") == formats.GOLDEN:
        return str(read_json(failed_path(golden))["failure"])
    stage, line = _failed_stage(load(only), tree, target)
    raise CheckError(f"{target}: expected {stage} to succeed again in a clean folder, found: {line}")


def _failed_stage(config: Config, tree: Results, target: Target) -> tuple[str, str]:
    """Return the stage that has a log and no output, and the last line of the log."""
    for job in jobs(config, tree.root, [target]):
        log = next((tree.root / "logs" / job.stage).rglob("*.log"), None)
        if log is not None and not job.output.is_file():
            lines = log.read_text().splitlines() or ["nothing in its log"]
            return job.stage, lines[-1].removeprefix(PREFIX)
    return "the plan", "the line above"


def _config_of_target(config: Mapping[str, Any], checkpoint: Path, target: Target) -> dict[str, Any]:
    """Return the config with this target only, the checkpoint's own folder, and no cache."""
    model = config["models"][target.model]

    # A config may expect texts of the layer counts that it lists.
    def with_expected_of_target(settings: Mapping[str, Any]) -> dict[str, Any]:
        prompts = []
        for prompt in settings["prompts"]:
            texts = prompt.get("expected", {}).items()
            expected = {layers: text for layers, text in texts if layers == str(target.layers)}
            prompts.append({**prompt, "expected": expected})
        return {**settings, "prompts": prompts}

    adapters = {name: with_expected_of_target(adapter) for name, adapter in model.get("adapters", {}).items()}
    only = {
        # Results may be a link to another disk, so resolve the path.
        "source": os.path.join(os.path.realpath(checkpoint.parent), checkpoint.name),
        "layers": [target.layers],
        "precisions": [target.precision],
        "backends": [target.backend],
        "backend_precisions": {},
        "golden": with_expected_of_target(model["golden"]),
        "adapters": adapters,
    }
    shared = {name: value for name, value in config.items() if name != "cache"}
    return {**shared, "models": {target.model: {**model, **only}}}


def _link_reference(finished: Results, tree: Results, target: Target) -> None:
    reference = finished.reference(target.model, target.layers)
    link = tree.reference(target.model, target.layers)
    link.parent.mkdir(parents=True)
    for suffix in (".json", SUFFIX, ".safetensors"):
        link.with_suffix(suffix).symlink_to(os.path.abspath(reference.with_suffix(suffix)))


def _copy_tactics(finished: Results, tree: Results, target: Target) -> None:
    """Copy the files of a record of tactics (`tactics: record` or `verified`): a build may write to them."""
    engines = finished.engines(target.model, target.precision, target.backend)
    folder = tree.engines(target.model, target.precision, target.backend).parent
    for file in EngineSetManifest.load(engines).details.get("tactics", {}).get("files", ()):
        path = engines.with_name(file["file"])
        if not path.is_file():
            raise CheckError(
                f"{path}: expected the tactics that the engines were built with, found no file; "
                f"build with tactics: record"
            )
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.name)
