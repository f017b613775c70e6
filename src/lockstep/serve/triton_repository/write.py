"""The writer of a model repository.

A configuration and a model.py for each of the five models. In: what starts the server, and its limits. Out:
OUT/MODEL/config.pbtxt, OUT/MODEL/1/*.py. The tensors are those of `triton_models`; tensorrt_llm and postprocessing have
two more between them, by which a stream keeps its spaces.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.artifacts.files import write_bytes
from lockstep.errors import InputError
from lockstep.serve.settings import ServiceLimits
from lockstep.serve.triton_models import MODELS, VERSION, Model, Spec
from lockstep.serve.triton_repository.options import TAKEN
from lockstep.serve.triton_repository.pbtxt import Enum, Message, dump

_FILES = Path(__file__).with_name("files")
_STEP = ("lockstep_http.py", "lockstep_watchdog.py")
_SHARED = (*_STEP, "lockstep_streams.py")
_SOURCES = {
    "preprocessing": ("steps.py", _STEP),
    "tensorrt_llm": ("tensorrt_llm.py", (*_SHARED, "lockstep_process.py")),
    "postprocessing": ("steps.py", _STEP),
    "tensorrt_llm_bls": ("tensorrt_llm_bls.py", _SHARED),
}
# Made for postprocessing: the tokens before a piece of a stream, and whether more comes.
EXTRA_OUTPUTS = {"tensorrt_llm": (Spec("CONTEXT_IDS", "INT32", (-1, -1)), Spec("IS_LAST", "BOOL", (1,)))}
# Where an input of a step has another name than the ensemble's, or comes from another step (_name).
_STEPS: dict[str, dict[str, str]] = {
    "preprocessing": {
        "QUERY": "text_input",
        "DECODER_QUERY": "decoder_text_input",
        "REQUEST_OUTPUT_LEN": "max_tokens",
        "BAD_WORDS_DICT": "bad_words",
        "STOP_WORDS_DICT": "stop_words",
        "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
        "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
        "END_ID": "end_id",
        "PAD_ID": "pad_id",
        "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
    },
    "tensorrt_llm": {
        "input_ids": "_INPUT_ID",
        "input_lengths": "_REQUEST_INPUT_LEN",
        "request_output_len": "_REQUEST_OUTPUT_LEN",
        "bad_words_list": "_BAD_WORDS_IDS",
        "stop_words_list": "_STOP_WORDS_IDS",
        "embedding_bias": "_EMBEDDING_BIAS",
        "streaming": "stream",
        "runtime_top_k": "top_k",
        "runtime_top_p": "top_p",
        "len_penalty": "length_penalty",
    },
    "postprocessing": {
        "TOKENS_BATCH": "_output_ids",
        "SEQUENCE_LENGTH": "_sequence_length",
        "CONTEXT_IDS": "_CONTEXT_IDS",
        "IS_LAST": "_IS_LAST",
    },
}


@dataclass(frozen=True)
class Repository:
    """The settings of a model repository.

    command: that starts the server. max_batch_size: prompts of a request. max_queue: requests that may wait. options:
    of tensorrt_llm's parameters, instead of their defaults.
    """

    command: Sequence[str]
    socket: Path
    max_batch_size: int
    max_queue: int = ServiceLimits.max_queue
    decoupled: bool = True
    options: Mapping[str, str] | None = None


def write_repository(repository: Repository, out: Path) -> None:
    """Write all files, each whole or not at all; others in `out` are left.

    Raises InputError.
    """
    if len(str(repository.socket).encode()) > 107:
        raise InputError(f"--socket: expected a path of at most 107 bytes, found {repository.socket}; give another one")
    for path, data in files_of(repository).items():
        write_bytes(out / path, data)


def files_of(repository: Repository) -> dict[str, bytes]:
    """Return the contents of all files, by path."""
    found = {}
    for name, model in MODELS.items():
        found[f"{name}/config.pbtxt"] = dump(config_of(model, repository)).encode()
        for path, source in sources_of(name).items():
            found[path] = source
    # Triton loads a model only where there is a folder for its version, also one that an ensemble leaves empty.
    found[f"ensemble/{VERSION}/README"] = b"Triton expects this folder; an ensemble has nothing in it.\n"
    return found


def sources_of(name: str) -> dict[str, bytes]:
    """Return the Python files of a model, by path."""
    if name not in _SOURCES:
        return {}
    source, shared = _SOURCES[name]
    folder = f"{name}/{VERSION}"
    found = {f"{folder}/{each}": (_FILES / each).read_bytes() for each in shared}
    return {f"{folder}/model.py": (_FILES / source).read_bytes(), **found}


def config_of(model: Model, repository: Repository) -> Message:
    """Return the configuration of a model."""
    is_ensemble = model.name == "ensemble"
    outputs = [*model.outputs.values(), *EXTRA_OUTPUTS.get(model.name, ())]
    config: Message = {"name": [model.name]}
    config |= {"platform": ["ensemble"]} if is_ensemble else {"backend": ["python"]}
    config["max_batch_size"] = [repository.max_batch_size]
    config["input"] = [
        {**_tensor(spec), **({} if spec.use == "required" else {"optional": [True]})} for spec in model.listed
    ]
    config["output"] = [_tensor(spec) for spec in outputs]
    if is_ensemble:
        return {**config, "ensemble_scheduling": [{"step": [_step(name) for name in _STEPS]}]}
    if model.generates:
        config["model_transaction_policy"] = [{"decoupled": [repository.decoupled]}]
        batching: Message = {"max_queue_delay_microseconds": [0]}
        if model.name == "tensorrt_llm":
            batching["default_queue_policy"] = [{"max_queue_size": [repository.max_queue]}]
        # Not for the other two: what takes cancelled requests out of this queue gives an ensemble an error while its
        # stream runs, and Triton 2.51 never ends a request of an ensemble that fails with another step in flight.
        config["dynamic_batching"] = [batching]
    # One instance: responses of a stream keep their order.
    config["instance_group"] = [{"count": [1], "kind": [Enum("KIND_CPU")]}]
    parameters = {"FORCE_CPU_ONLY_INPUT_TENSORS": "yes", "lockstep_socket": str(repository.socket)}
    if model.name == "tensorrt_llm":
        parameters |= {"lockstep_command": shlex.join(repository.command), "lockstep_start_seconds": "600"}
        parameters |= {"gpt_model_type": "inflight_fused_batching", **TAKEN, **(repository.options or {})}
    elif model.generates:
        given = {**TAKEN, **(repository.options or {})}
        parameters |= {name: given[name] for name in ("exclude_input_in_output", "cancellation_check_period_ms")}
    config["parameters"] = [
        {"key": [key], "value": [{"string_value": [value]}]} for key, value in sorted(parameters.items())
    ]
    return config


def _tensor(spec: Spec) -> Message:
    kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": [spec.name], "data_type": [Enum(f"TYPE_{kind}")], "dims": list(spec.dims)}


def _step(name: str) -> dict[str, Any]:
    model, ensemble, names = MODELS[name], MODELS["ensemble"], _STEPS[name]
    inputs = {spec.name: names.get(spec.name, spec.name) for spec in model.listed}
    inputs = {key: value for key, value in inputs.items() if value[0] == "_" or value in ensemble.inputs}
    made = [*model.outputs.values(), *EXTRA_OUTPUTS.get(name, ())]
    outputs = {spec.name: spec.name if spec.name in ensemble.outputs else f"_{spec.name}" for spec in made}
    if name == "postprocessing":
        outputs = {"OUTPUT": "text_output"}
    used = {value for step in _STEPS.values() for value in step.values()} | set(ensemble.outputs)
    pairs = lambda found: [
        {"key": [key], "value": [value]} for key, value in found.items() if value in used or key in inputs
    ]
    return {"model_name": [name], "model_version": [-1], "input_map": pairs(inputs), "output_map": pairs(outputs)}
