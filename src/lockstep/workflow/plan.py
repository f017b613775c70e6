"""The plan that the workflow's rules read, as plain JSON.

Snakemake's question in (its merged config, config files and results folder); targets, paths and parameters out. The
config is read and checked only here. Errors before any job: a mistake in the config, a damaged checkpoint, a backend
that is not installed, and in a locked run any difference from the lock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.artifacts.files import check_writable
from lockstep.config.backends import backends
from lockstep.config.documents import check_config, read_document
from lockstep.config.load import DEMO, load_merged, plain
from lockstep.config.schema import Config
from lockstep.config.sources import REPOSITORY
from lockstep.config.types import PRECISIONS
from lockstep.errors import InputError
from lockstep.provenance.cache import cache_folder
from lockstep.provenance.code_identity import stage_key, untested
from lockstep.provenance.locked import check_project, find_lock, is_locked, not_in_config
from lockstep.stages import STAGES, jobs, params
from lockstep.stages.files import ModelFiles, model_files
from lockstep.stages.rules import collected_targets
from lockstep.targets import Results

_HOW_TO_RUN = ("locked", "device", "container")  # keys of Snakemake's config that are not in our schema


def make_plan(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan.

    question: the workflow's `version`; `config`, `files` and `options` of Snakemake, `results`, whether it `starts` a
    run, and whether it `has_environments` for jobs. Raises InputError or CheckError where a run must not start.
    """
    version = question.get("version", "an older one")
    # As a module of another workflow, from git, it may have another version than the installed package.
    if version != __version__:
        raise InputError(
            f"workflow: expected version {__version__}, that of the package lockstep-engines, found {version}; install "
            f"the package of that version, or name the tag v{__version__}"
        )
    _check_folder()
    merged = question["config"]
    files = question["files"]
    # Without a config, run the demo. As the Snakefile's default, its models would be merged into a user's config.
    if "models" not in merged:
        files = [str(DEMO if DEMO.exists() else REPOSITORY / DEMO)]
        check_config(files[0])
        merged = {**plain(read_document(files[0])), **merged}
    config = load_merged(merged, files, question["options"], _HOW_TO_RUN)
    results = Results(Path(question["results"]))
    places = config.check_sources([Path.cwd(), REPOSITORY], results=results)
    models = {model: model_files(config, model, places.get(model), results) for model in config.models}
    # If Snakemake makes environments for jobs, these have the backends, and they may be missing here.
    if not question["has_environments"]:
        config.check_backends()
    # Only for its error, which would otherwise come from every job.
    cache_folder(config.cache)
    device = config.check_device(merged.get("device"))
    notes: list[str] = []
    warnings: list[str] = []
    if question["starts"]:
        notes += _notes(config)
        if is_locked(merged):
            notes += _check_locked(config, models, results)
        if line := untested():
            warnings.append(line)
    targets = collected_targets(config)
    backend_names = sorted({target.backend for target in targets["all"]})
    jobs_of_models = {}
    for model, model_paths in models.items():
        jobs_of_models[model] = {
            **asdict(model_paths),
            "is_any_adapter_on_the_hub": bool(params.hub_adapters(config, model)),
            "tensor_parallel": config.models[model].tensor_parallel,
        }
    return {
        "cache": config.cache,
        "constraints": {
            "model": "|".join(sorted(config.models)),
            "precision": "|".join(PRECISIONS),
            "layers": "all|[1-9][0-9]*",
            "backend": "|".join([*backends(), *config.devices]),
        },
        "device": device,
        "targets": {word: list(map(asdict, chosen)) for word, chosen in targets.items()},
        "names": [str(target) for target in targets["all"]],
        "not_run": config.not_run(),
        "params": {name: params.table(name, config, targets["all"]) for name in params.names()},
        "stages": _stages(backend_names, config),
        "models": jobs_of_models,
        "gpus": {name: _gpus(config, name) for name in backend_names},
        "gpu_models": {name: entry.gpu_model for name, entry in config.devices.items() if entry.gpu_model},
        "endpoints": {name: entry.model_dump(mode="json") for name, entry in config.endpoints.items()},
        "notes": notes,
        "warnings": warnings,
    }


def _check_folder() -> None:
    """Check that Snakemake can keep its own files here, dry runs too: it would end in a traceback."""
    # The innermost folder that exists: Snakemake makes the others in it.
    place = next(filter(os.path.exists, (".snakemake/locks", ".snakemake", ".")))
    check_writable(Path(place), "make it writable, or name another by --directory")


def _check_locked(config: Config, models: Mapping[str, ModelFiles], results: Results) -> list[str]:
    """Check all models against their locks before any job. Return lines on locked targets that the config lacks."""
    dropped = []
    for model, files in models.items():
        targets = [target for target in config.targets() if target.model == model]
        checkpoint = None
        if files.kind == "folder":
            checkpoint = [Path(path) for path in (*files.sides, *files.weights)]
        lock_file = find_lock(model, [Path(), REPOSITORY])
        check_project(lock_file, jobs(config, results.root, targets), checkpoint)
        if names := not_in_config(lock_file, targets):
            dropped.append(f"Locked, and no targets of the config: {', '.join(f'{model}/{name}' for name in names)}")
    return dropped


def _gpus(config: Config, backend: str) -> int:
    # Its jobs at most build engines, for which no GPU is needed.
    if backend in config.not_run():
        return 0
    return config.gpus(backend)


def _stages(backend_names: list[str], config: Config) -> dict[str, dict[str, str]]:
    """Return {stage, or stage/backend: digests of code and pinned packages}, a change of which reruns its jobs."""
    keys = {"summary": stage_key("report.summary")}
    for name, stage in STAGES.items():
        if "backend" not in stage.wildcards:
            keys[name] = stage_key(stage.module)
            continue
        for backend in backend_names:
            keys[f"{name}/{backend}"] = stage_key(stage.module, config.backend_of(backend))
    return keys


def _notes(config: Config) -> list[str]:
    skipped = config.skipped_backends().items()
    lines = [f"Left out: the targets of {backend}, for {reason}" for backend, reason in skipped]
    not_built = config.not_built()
    for name, reason in config.not_run().items():
        what = "Neither built nor run" if name in not_built else "Built, not run"
        lines.append(f"{what}: the targets of {name}, which {reason}")
    return lines
