"""The lint of a model repository.

It says what Triton says only when it starts, or when a request fails, and what it never says.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import InputError
from lockstep.serve.triton_models import MODELS, VERSION, Model
from lockstep.serve.triton_repository.options import OWN, options_of, parameters_of, read_config
from lockstep.serve.triton_repository.pbtxt import Message
from lockstep.serve.triton_repository.write import EXTRA_OUTPUTS, sources_of


def check_repository(folder: Path) -> list[str]:
    """Return the faults of a repository, one a line; none where it is right.

    Raises InputError where `folder` is none.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder that `lockstep triton` wrote, found none")
    faults: list[str] = []
    configs: dict[str, Message] = {}
    for name in MODELS:
        try:
            configs[name] = read_config(folder / name / "config.pbtxt")
        except InputError as error:
            faults.append(str(error))
    for name, config in configs.items():
        where = str(folder / name / "config.pbtxt")
        faults += _model(MODELS[name], config, where)
        faults += _sources(folder, name)
    if core := configs.get("tensorrt_llm"):
        faults += _core(core, str(folder / "tensorrt_llm" / "config.pbtxt"))
    if "ensemble" in configs:
        faults += _ensemble(configs, str(folder / "ensemble" / "config.pbtxt"))
    faults += _alike(configs, folder)
    return faults


def _model(model: Model, config: Message, where: str) -> Iterator[str]:
    if config.get("name", [model.name]) != [model.name]:
        yield f"{where}: name: expected {model.name}, found {config['name'][0]}; name it as its folder"
    if model.name != "ensemble" and config.get("backend") != ["python"]:
        yield f"{where}: backend: expected python, found {config.get('backend', ['none'])[0]}"
    extra = {spec.name: spec for spec in EXTRA_OUTPUTS.get(model.name, ())}
    for kind, expected in (("input", {spec.name: spec for spec in model.listed}), ("output", model.outputs | extra)):
        found = {each.get("name", [""])[0]: each for each in config.get(kind, [])}
        for name in found.keys() - expected.keys():
            yield f"{where}: {kind}: expected tensors of {model.name}, found {name!r}; leave it out"
        for name, spec in expected.items():
            if name not in found:
                if kind == "output" or spec.use == "required":
                    yield f"{where}: {kind}: expected {name}, found none; write the repository again"
                continue
            wanted = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
            given = found[name].get("data_type", ["none"])[0]
            if given != wanted:
                yield f"{where}: {name}: data_type: expected {wanted}, found {given}"
            if tuple(found[name].get("dims", [])) != spec.dims:
                yield f"{where}: {name}: dims: expected {list(spec.dims)}, found {found[name].get('dims', [])}"


def _sources(folder: Path, name: str) -> Iterator[str]:
    if not (folder / name / VERSION).is_dir():
        yield f"{folder / name / VERSION}: expected a folder, found none: Triton does not load the model; make it"
    for path, data in sources_of(name).items():
        file = folder / path
        if not file.is_file():
            yield f"{file}: expected a file, found none; write the repository again"
        elif file.read_bytes() != data:
            yield f"{file}: expected what this version of Lockstep writes, found another; write the repository again"


def _core(config: Message, where: str) -> Iterator[str]:
    try:
        options_of(config, where)
    except InputError as error:
        yield str(error)
    given = parameters_of(config)
    if missing := sorted(OWN - {name for name, value in given.items() if value}):
        yield f"{where}: parameters: expected {', '.join(missing)}, found none; write the repository again"
        return
    try:
        command = shlex.split(given["lockstep_command"])
    except ValueError as error:
        yield f"{where}: lockstep_command: expected a command line, found {error}"
        return
    if not command or shutil.which(command[0]) is None:
        yield f"{where}: lockstep_command: expected a program, found {command[:1]}; correct its path"
    if given["lockstep_socket"] not in command:
        yield f"{where}: lockstep_command: expected --unix {given['lockstep_socket']}, found it nowhere in the command"


def _alike(configs: dict[str, Message], folder: Path) -> Iterator[str]:
    """Yield a fault for each value that all models must share and do not."""
    found = {name: config.get("max_batch_size", [0])[0] for name, config in configs.items()}
    sockets = {
        name: parameters_of(config).get("lockstep_socket") for name, config in configs.items() if name != "ensemble"
    }
    for what, values in (("max_batch_size", found), ("lockstep_socket", sockets)):
        if len(set(values.values())) > 1:
            given = ", ".join(f"{name}: {value}" for name, value in values.items())
            yield f"{folder}: {what}: expected the same of all models, found {given}"


def _ensemble(configs: dict[str, Message], where: str) -> Iterator[str]:
    """Yield the faults of the ensemble's steps.

    Each step's tensors must exist, and each value that is read must be made.
    """
    config = configs["ensemble"]
    names = lambda message, kind: {each.get("name", [""])[0] for each in message.get(kind, [])}
    steps = [step for each in config.get("ensemble_scheduling", []) for step in each.get("step", [])]
    known = names(config, "input")
    made: set[str] = set()
    read: list[tuple[str, str]] = []
    for step in steps:
        name = step.get("model_name", [""])[0]
        if name not in configs or name == "ensemble":
            yield f"{where}: step: expected a model of the repository, found {name!r}"
            continue
        for field, kind in (("input_map", "input"), ("output_map", "output")):
            for pair in step.get(field, []):
                key, value = pair.get("key", [""])[0], pair.get("value", [""])[0]
                if key not in names(configs[name], kind):
                    yield f"{where}: {name}: {field}: expected an {kind} of {name}, found {key!r}"
                if kind == "input":
                    read.append((name, value))
                else:
                    made.add(value)
    for name, value in read:
        if value not in known | made:
            yield f"{where}: {name}: expected an input of the ensemble or an output of a step, found {value!r}"
    for name in sorted(names(config, "output") - made):
        yield f"{where}: output: expected {name} to be an output of a step, found that no step makes it"
