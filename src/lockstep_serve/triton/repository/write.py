"""The writer of a model repository: OUT/MODEL/config.pbtxt and OUT/MODEL/1/*.py of the five models."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.artifacts.files import write_bytes
from lockstep.errors import InputError
from lockstep_serve.settings import ServiceLimits
from lockstep_serve.triton.grpc_messages import MESSAGES
from lockstep_serve.triton.model_config import text_of
from lockstep_serve.triton.models import MODELS, VERSION, config
from lockstep_serve.triton.repository.options import TAKEN

_SOURCES = {path.name: path.read_bytes() for path in Path(__file__).with_name("files").glob("*.py")}
# Outputs for postprocessing: the tokens before a piece of a stream, and whether it is the last.
_CONTEXT: list[dict[str, Any]] = [
    {"name": "CONTEXT_IDS", "data_type": "TYPE_INT32", "dims": [-1, -1]},
    {"name": "IS_LAST", "data_type": "TYPE_BOOL", "dims": [1]},
]
_STEPS = ("preprocessing", "tensorrt_llm", "postprocessing")


@dataclass(frozen=True)
class Repository:
    """The settings of a model repository; command: of the server. max_queue: requests that may wait."""

    command: Sequence[str]
    socket: Path
    max_batch_size: int
    max_queue: int = ServiceLimits.max_queue
    decoupled: bool = True
    options: Mapping[str, str] = field(default_factory=dict)


def write_repository(repository: Repository, out: Path) -> None:
    """Write all files, each atomically; other files in `out` stay. Raises InputError."""
    if len(str(repository.socket).encode()) > 107:
        raise InputError(f"--socket: expected a path of at most 107 bytes, found {repository.socket}; give another one")
    for path, data in files_of(repository).items():
        write_bytes(out / path, data)


def files_of(repository: Repository) -> dict[str, bytes]:
    """Return the contents of all files, by path."""
    # Triton loads a model only if its version has a folder, even an ensemble, which needs no file in it.
    files = {f"ensemble/{VERSION}/README": b"Triton expects this folder; an ensemble has nothing in it.\n"}
    for name in MODELS:
        files[f"{name}/config.pbtxt"] = text_of(config_of(name, repository)).encode()
        files |= sources_of(name)
    return files


def sources_of(name: str) -> dict[str, bytes]:
    return {f"{name}/{VERSION}/{file}": data for file, data in _SOURCES.items() if name != "ensemble"}


def config_of(name: str, repository: Repository) -> Any:
    """Return the ModelConfig of a model."""
    fields = config(MODELS[name], repository.max_batch_size)
    if name == "ensemble":
        del fields["backend"], fields["model_transaction_policy"]
        fields["platform"] = "ensemble"
        return MESSAGES["ModelConfig"](**fields, ensemble_scheduling={"step": list(map(_step, _STEPS))})
    options = TAKEN | dict(repository.options)
    values = {"FORCE_CPU_ONLY_INPUT_TENSORS": "yes", "lockstep_socket": str(repository.socket)}
    if MODELS[name].generates:
        values |= {name: options[name] for name in ("exclude_input_in_output", "cancellation_check_period_ms")}
        fields["model_transaction_policy"] = {"decoupled": repository.decoupled}
        fields["dynamic_batching"] = {"max_queue_delay_microseconds": 0}
    if name == "tensorrt_llm":
        values |= {"lockstep_command": shlex.join(repository.command), "lockstep_start_seconds": "600"}
        values |= {"gpt_model_type": "inflight_fused_batching", **options}
        fields["output"] += _CONTEXT
        # Not for the other two models: a queue policy fails cancelled requests of an ensemble while its stream runs,
        # and Triton 2.51 never ends a request of an ensemble that fails with another step in flight.
        fields["dynamic_batching"]["default_queue_policy"] = {"max_queue_size": repository.max_queue}
    fields["backend"] = "python"
    fields["instance_group"] = [{"count": 1, "kind": "KIND_CPU"}]  # one: responses of a stream keep their order
    fields["parameters"] = {key: {"string_value": value} for key, value in values.items()}
    return MESSAGES["ModelConfig"](**fields)


def _step(name: str) -> dict[str, Any]:
    """Return a step of the ensemble, with the ensemble's name of each tensor. Names with _ are between steps."""
    ensemble = MODELS["ensemble"]
    inputs = {spec.name: spec.value or spec.name for spec in MODELS[name].listed}
    outputs = {tensor: f"_{tensor}" for tensor in MODELS[name].outputs}
    outputs |= {tensor: tensor for tensor in MODELS[name].outputs if tensor in ensemble.outputs}
    if name == "tensorrt_llm":
        outputs |= {tensor["name"]: f"_{tensor['name']}" for tensor in _CONTEXT}
    if name == "postprocessing":
        outputs["OUTPUT"] = "text_output"
    connected = {*ensemble.inputs, *ensemble.outputs}
    for step in _STEPS:
        connected |= {spec.value for spec in MODELS[step].listed}
    return {
        "model_name": name,
        "model_version": -1,
        "input_map": {tensor: value for tensor, value in inputs.items() if value in connected},
        "output_map": {tensor: value for tensor, value in outputs.items() if value in connected},
    }
