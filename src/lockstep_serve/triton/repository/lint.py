"""The lint of a model repository: differences from what `lockstep triton` would write with its settings."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep_serve.triton.grpc_messages import MESSAGES
from lockstep_serve.triton.model_config import parameters_of, read_config, text_of
from lockstep_serve.triton.models import MODELS, VERSION
from lockstep_serve.triton.repository.options import OWN, serve_options
from lockstep_serve.triton.repository.write import Repository, config_of, sources_of


def check_repository(folder: Path) -> list[str]:
    """Return the faults of a repository, one a line. Raises InputError where `folder` is none."""
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder that `lockstep triton` wrote, found none")
    faults: list[str] = []
    configs: dict[str, Any] = {}
    for name in MODELS:
        try:
            configs[name] = read_config(folder / name / "config.pbtxt")
            if name == "tensorrt_llm":
                serve_options(folder)
        except InputError as error:
            faults.append(str(error))
    for name, config in configs.items():
        where = str(folder / name / "config.pbtxt")
        core = configs.get("tensorrt_llm", config)
        config.name = config.name or name  # without one it is the folder's
        socket = Path(parameters_of(core).get("lockstep_socket", "none"))
        faults += _differences(config_of(name, Repository((), socket, core.max_batch_size)), config, where)
        faults += _sources(folder, name)
        if name == "tensorrt_llm":
            faults += _command(parameters_of(config), where)
    return faults


def _differences(expected: Any, config: Any, where: str) -> Iterator[str]:
    expected_fields = _fields(expected)
    fields = _fields(config)
    optional = {f"input {tensor.name}" for tensor in expected.input if tensor.optional}
    optional |= {key for key in expected_fields if ", input_map " in key}  # Triton checks those that a step needs
    for key in [*expected_fields, *sorted(fields.keys() - expected_fields.keys())]:
        expected_field = expected_fields.get(key, "none")
        field = fields.get(key, "none")
        if field != expected_field and (key in fields or key not in optional):
            yield f"{where}: {key}: expected {expected_field}, found {field}; correct it"


def _fields(config: Any) -> dict[str, str]:
    """Return the names of the fields that no user may change."""
    fields = {name: str(getattr(config, name)) or "none" for name in ("name", "platform", "backend", "max_batch_size")}
    fields["lockstep_socket"] = parameters_of(config).get("lockstep_socket", "none")
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            shown = MESSAGES["ModelOutput"](data_type=tensor.data_type, dims=tensor.dims)
            fields[f"{kind} {tensor.name}"] = text_of(shown, in_one_line=True)
    for step in config.ensemble_scheduling.step:
        for kind, names in (("input_map", step.input_map), ("output_map", step.output_map)):
            fields |= {f"step {step.model_name}, {kind} {name}": value for name, value in names.items()}
    return fields


def _sources(folder: Path, name: str) -> Iterator[str]:
    if not (folder / name / VERSION).is_dir():
        yield f"{folder / name / VERSION}: expected a folder, found none: Triton does not load the model; make it"
        return
    for path, data in sources_of(name).items():
        file = folder / path
        if not file.is_file() or file.read_bytes() != data:
            fault = "another" if file.is_file() else "none"
            yield f"{file}: expected what this version of Lockstep writes, found {fault}; write the repository again"


def _command(parameters: Mapping[str, str], where: str) -> Iterator[str]:
    missing = sorted(OWN - parameters.keys())
    if missing:
        yield f"{where}: parameters: expected {', '.join(missing)}, found none; write the repository again"
        return
    socket = parameters["lockstep_socket"]
    try:
        program, *arguments = shlex.split(parameters["lockstep_command"])
        if shutil.which(program) is None:
            yield f"{where}: lockstep_command: expected a program, found {program!r}; correct its path"
        if socket not in arguments:
            yield f"{where}: lockstep_command: expected --unix {socket}, found it nowhere; correct it"
    except ValueError as error:
        yield f"{where}: lockstep_command: expected a command line, found {error}; correct it"
