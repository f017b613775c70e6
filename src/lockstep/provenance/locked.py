"""Checks of what is to be made, and of what was made, against the lock.

The first difference is named with its cause, and nothing is made from it.

What can be known before the work is refused before it (`check_project`, `check_step`): targets, the terms of the
checks, the checkpoint's files, the device of a backend, and every file that is read. What a stage makes is compared as
soon as it is made (`check_output`). Other code and other packages are no difference while the same comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.build_record import BuildKey
from lockstep.errors import CheckError, InputError
from lockstep.manifests.digest_cache import check_files, digest
from lockstep.manifests.manifest_files import named_files
from lockstep.pipeline.pinned import device_name
from lockstep.pipeline.stages import entry_of
from lockstep.pipeline.step import JobSpec
from lockstep.provenance.diff import changes, words
from lockstep.provenance.lock import TERMS, Lock, lock_path
from lockstep.provenance.lockfile import Section, made_with, maker, operators_of, sections_at, terms, terms_place
from lockstep.provenance.record import record_path
from lockstep.provenance.slsa import provenance_path

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.targets import Target

# Recorded where a model comes from, and not compared: it may lie elsewhere.
_PLACES = ("source",)


def is_locked(config: Mapping[str, Any]) -> bool:
    """Return whether Snakemake's config says `locked`.

    The command line gives it as a text. Raises InputError for anything but true and false.
    """
    value = config.get("locked", False)
    found = {"true": True, "false": False}.get(str(value).lower())
    if found is None:
        raise InputError(f"locked: expected true or false, found {value!r}; correct it")
    return found


def find_lock(model: str, folders: Sequence[Path]) -> Path:
    """Return the lock of a model in the first of `folders` that has one.

    Each holds `locks/`. Raises InputError where none has.
    """
    for folder in folders:
        path = lock_path(folder / "locks", model)
        if path.is_file():
            return path
    places = " or ".join(dict.fromkeys(str(folder / "locks") for folder in folders))
    raise InputError(
        f"locked: expected {model}.lock.json in {places}, found none; write it with `lockstep "
        f"lock`, or run without locked"
    )


def check_project(
    lock_file: Path,
    targets: Sequence[Target],
    steps: Sequence[JobSpec],
    prompts: Sequence[str],
    checkpoint: Sequence[Path] | None,
) -> None:
    """Check before a run that nothing will differ from the lock.

    targets, their steps, prompts: of the lock's model. checkpoint: the model's files where they lie in a folder, None
    where a job brings them. Raises CheckError for the first thing that will differ.
    """
    lock = Lock.load(lock_file)
    for line in _before(lock, targets, steps, prompts, checkpoint):
        _refuse(line, lock_file)
    for step in steps:
        if other := _other_terms(lock, step):
            _refuse(other, lock_file)


def _before(
    lock: Lock,
    targets: Sequence[Target],
    steps: Sequence[JobSpec],
    prompts: Sequence[str],
    checkpoint: Sequence[Path] | None,
) -> Iterator[str]:
    # Those whose engines run here.
    judged = {
        tuple(step.names[name] for name in ("precision", "layers", "backend"))
        for step in steps
        if step.stage == "golden"
    }
    built = {(step.names["precision"], step.names["backend"]) for step in steps if step.stage == "build"}
    if checkpoint is not None:
        found = {path.name: digest(path) for path in checkpoint}
        expected = {name: value for name, value in without_places(lock.checkpoint).items() if name != "commit"}
        yield from (f"resolve: {name} differs: {change}" for (name, *_), change in changes(expected, found))
    for target in targets:
        precision, layers, backend = target.precision, str(target.layers), target.backend
        golden = ("precisions", precision, "golden", backend, layers)
        for where, is_there in (
            (("precisions", precision), precision in lock.precisions),
            (("reference", layers), layers in lock.reference),
            (
                ("precisions", precision, "engines", backend),
                (precision, backend) not in built or lock.devices(precision, backend) is not None,
            ),
            (golden, (precision, layers, backend) not in judged or lock.section(golden) is not None),
        ):
            if not is_there:
                yield f"{target}: {'/'.join(where)} is not in the lock"
        for (text, *_), change in changes(dict.fromkeys(lock.reference[layers], ""), dict.fromkeys(prompts, "")):
            yield f"reference: prompt {text!r} differs: {change.partition(',')[0]}"


def locked_commit(lock_file: Path, source: str) -> str | None:
    """Return the commit of the hub at which `source` is locked.

    It stays, wherever its branch is now. None where the lock is of another source.
    """
    lock = Lock.load(lock_file)
    return lock.commit if lock.checkpoint["source"] == source else None


def before_weights(config: Config, model: str, lock_file: Path | None) -> Callable[[Path, str], None]:
    """Return the check that `hub.fetch` calls before it downloads a model's weights.

    It is called with the folder of the model's small files and its commit: does the model fit the config, and, where
    there is a lock, is its commit the locked one? It raises InputError and CheckError.
    """

    def check(folder: Path, commit: str) -> None:
        config.check_model(model, folder)
        if lock_file and (line := other_commit(Lock.load(lock_file), commit)):
            _refuse(line, lock_file)

    return check


def fetch_terms(config: Config, model: str, lock_file: Path | None, newest: bool = False) -> dict[str, Any]:
    """Return what `hub.fetch` is held to, by its parameters.

    The check before the weights, and the locked commit.
    """
    commit = locked_commit(lock_file, config.models[model].source) if lock_file and not newest else None
    return {"check": before_weights(config, model, lock_file), "commit": commit}


def check_step(step: JobSpec, key: BuildKey, lock_file: Path) -> None:
    """Check before a stage that its inputs, terms and device are as locked.

    Raises CheckError when what it reads is not locked, or when it would be made on other terms or for another device;
    InputError when a file that a manifest names is not the one.
    """
    lock = Lock.load(lock_file)
    for path in step.inputs.values():
        if record_path(path).is_file():
            for section in sections_at(path):
                if line := difference(lock, section):
                    _refuse(line, lock_file)
            check_files(named_files(path), "make it again")
    if line := _other_terms(lock, step):
        _refuse(line, lock_file)
    if step.stage == "build" and key.backend:
        here = device_name(key.backend)
        devices = lock.devices(step.names["precision"], step.names["backend"]) or {}
        if here not in devices:
            _refuse(f"build: device differs: {' or '.join(sorted(devices)) or 'none'} -> {here}", lock_file)


def check_output(output: Path, lock_file: Path) -> None:
    """Check after a stage that its artefact is the locked one.

    Raises CheckError, and takes the manifest `output` away, when it is not.
    """
    if line := reject(output, lock_file):
        _refuse(line, lock_file)


def reject(output: Path, lock_file: Path) -> str | None:
    """Return the first difference of an artefact from the lock.

    A difference takes its manifest `output` away. None when it is the locked one.
    """
    line = first_difference(output, Lock.load(lock_file))
    if line is not None:
        for path in (output, record_path(output), provenance_path(output)):
            path.unlink(missing_ok=True)
    return line


def first_difference(output: Path, lock: Lock) -> str | None:
    """Return the first difference of the artefact of a manifest from a lock.

    None when it is as locked, or is not locked. output: the manifest.
    """
    return next((line for section in sections_at(output) if (line := difference(lock, section))), None)


def _other_terms(lock: Lock, step: JobSpec) -> str | None:
    """Return the first of a check's terms that the config and the lock differ in.

    None where they agree.
    """
    if not entry_of(step).is_check:
        return None
    locked = lock.section(terms_place(step.stage, step.names))
    if locked is None:
        return f"{step}: the terms of this check are not in the lock"
    return next(
        (f"{step}: {'.'.join(where)} differs: {change}" for where, change in changes(locked, terms(step.options))), None
    )


def difference(lock: Lock, section: Section) -> str | None:
    """Return the first difference of an artefact from the lock.

    With what else differs that may have caused it. None when it is the same.
    """
    expected = lock.section(section.where)
    if expected is None:
        return f"{section.stage}: {'/'.join(section.where)} is not in the lock"
    differing = list(changes(without_places(expected), without_places(section.items)))
    if not differing:
        return None
    graph = next((each for each in differing if each[0][-1].endswith(".onnx")), None)
    where, change = graph or differing[0]
    opening = f"{section.stage}: {'.'.join(where)} differs: {change}"
    if graph and (constants := _only_constants(lock, section, where[-1])):
        return f"{opening}: its {constants} are others, its operators are as locked"
    makers = _other_makers(lock, section) if section.where[0] != TERMS else ""  # no code and no package changes terms
    return f"{opening}{makers and f', made with {makers}'}"


def _only_constants(lock: Lock, section: Section, file: str) -> str | None:
    """Return in words the constants of a graph, where nothing else in it differs from the locked one."""
    made = operators_of(section)
    locked = lock.makers[maker(section.key)].operators or {}
    name = f"{section.where[1]}/{file}"
    if name not in made or made[name] != locked.get(name):
        return None
    import onnx

    from lockstep.onnx_tools.constants import constants_in_words

    return constants_in_words(onnx.load(section.manifest.parent / file))


def without_places(items: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in items.items() if name not in _PLACES}


def other_commit(lock: Lock, commit: str | None) -> str | None:
    return next((f"fetch: commit differs: {change}" for _, change in changes(lock.commit, commit)), None)


def _other_makers(lock: Lock, section: Section) -> str:
    """Return what of the makers of an artefact is not as in the lock.

    Packages, library, whether the code is another.
    """
    locked, now = lock.makers.get(maker(section.key)), made_with(section.key)
    if locked is None:
        return ""
    packages = [f"{' '.join(where)} {change}" for where, change in changes(locked.packages, now.packages)]
    libraries = changes(locked.backend or {}, now.backend or {})
    backend = [f"{section.key.names['backend']} {'.'.join(where)} {change}" for where, change in libraries]
    code = [f"code {words(locked.code)} -> {words(now.code)}"] if locked.code != now.code else []
    options = changes(locked.options or {}, now.options or {})
    return ", ".join([*packages, *backend, *(f"option {'.'.join(where)} {change}" for where, change in options), *code])


def _refuse(line: str, lock_file: Path) -> None:
    raise CheckError(f"{line}; locked by {lock_file}: undo the change, or run without locked and `lockstep lock` again")
