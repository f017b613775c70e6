"""The first config of a model: where it comes from in, a commented YAML file that works as it is out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from lockstep.config.backends import backends
from lockstep.config.packing import MXFP4, Packing, precision_of
from lockstep.config.sources import GgufSource, HubSource, RandomSource, parse_source, read_shape

# The longest requests that a first config asks for: enough to chat, and checked to their last token in minutes.
MAX_TOKENS = 4096
_BATCH_SIZE = 16
_STEP_TOKENS = 1024
# The long prompt of the golden check. transformers computes it twice on this CPU, in float32 and rounded: 4,096 tokens
# would take minutes even with a small model.
_LONG_PROMPT = 1000
# Below this many parameters fp32 is quick on a CPU; above, 8-bit weights read a quarter of the memory for each token.
_SMALL = 500_000_000
_WEIGHTS_SHARE = 0.8  # of memory; the rest is for the KV cache and activations
PARAMETER_NBYTES = {  # with scales
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "w8a16": 1.2,
    "w4a16": 0.7,
    "w8a8": 1.2,
    "w4a8": 0.7,
    "w8a8-fp8": 1.05,
}


@dataclass(frozen=True)
class Choice:
    """The precision and backend of a first config, and why they are it."""

    precision: str
    backend: str
    why: str


def choose(parameters: int | None, packing: Packing | None, memory: int) -> Choice:
    """Choose by the hardware here, by the model's number of parameters, and by the packing of its weights.

    The first precision whose weights fit into the memory of the GPU, or into `memory` bytes where there is none.
    """
    cuda = backends()["cuda"]
    on_gpu = cuda.missing() is None and cuda.cannot_run() is None
    backend = "cuda" if on_gpu else "onnxruntime"
    if packing is not None:
        if packing.layout == MXFP4:  # which OpenVINO multiplies with; ONNX Runtime decodes it first
            backend = "openvino" if backends()["openvino"].missing() is None else "onnxruntime"
        return Choice(precision_of(packing.bits), backend, "as the checkpoint is quantised")
    if parameters is None:
        parameters = _SMALL
    precisions = {}
    if on_gpu:
        precisions["fp16"] = "there is a GPU here; also w8a16, w4a16"
        memory = cuda.device_memory()
    elif parameters < _SMALL:
        precisions["fp32"] = "a small model on a CPU; also fp16, w8a16, w4a16"
    precisions["w8a16"] = "half the memory of fp16; also fp16, w4a16"
    precisions["w4a16"] = "what fits into the memory here; also w8a16, fp16"
    room = _WEIGHTS_SHARE * memory
    fitting = (name for name in precisions if PARAMETER_NBYTES[name] * parameters <= room)
    # If none fits, take the smallest; `init` prints how much memory it needs.
    precision = next(fitting, "w4a16")
    return Choice(precision, backend, precisions[precision])


def name_of(source: str) -> str:
    """Return a model's name for a source: of its folder, file or repository, in the characters that names have."""
    kind = parse_source(source)
    if isinstance(kind, HubSource):
        text = kind.repository.rpartition("/")[2]
    elif isinstance(kind, GgufSource):
        text = Path(kind.path).stem
    else:
        if isinstance(kind, RandomSource):
            path = Path(kind.config).parent.absolute()
        else:
            path = Path(kind.path).absolute()
        text = path.name
        repository = path.parent.parent.name
        if path.parent.name == "snapshots" and repository.startswith("models--"):  # of the hub's cache
            text = repository.rpartition("--")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:100] or "model"


def first_config(name: str, source: str, shape_file: Path, memory: int) -> str:
    """Return the text of a model's first config.

    shape_file: its config.json, the folder that holds it, or its GGUF file. memory: as of `choose`. Raises
    InputError for a model that cannot be read.
    """
    shape = read_shape(shape_file)
    length = min(shape.max_position_embeddings or MAX_TOKENS, MAX_TOKENS)
    # Half of a short context, so that an answer fits after it.
    long_prompt = min(_LONG_PROMPT, length // 2)
    choice = choose(shape.num_parameters, shape.packing, memory)
    positions = ""
    if shape.max_position_embeddings:
        positions = f"; the model knows {shape.max_position_embeddings}"
    return f"""\
# {name}: made and checked by `lockstep run`, then served by `lockstep serve`. All keys: config/README.md.
models:
  {_scalar(name)}:
    source: {_scalar(source)}
    precisions: [{choice.precision}] # {choice.why}
    backends: [{choice.backend}] # `lockstep doctor` says which run here
    golden: {{long_prompt: {long_prompt}}} # the context that logits are checked at; without it up to max_seq_len
limits:
  max_batch_size: {_BATCH_SIZE} # requests at once
  max_seq_len: {length} # tokens of a request, prompt and answer{positions}
  max_input_len: {length} # of its prompt
  max_num_tokens: {max(min(_STEP_TOKENS, length), _BATCH_SIZE)} # of all requests in one step
"""


def _scalar(text: str) -> str:
    """Return a text for YAML: in quotes where it needs them."""
    # The width keeps PyYAML from folding a long path over several lines.
    return yaml.safe_dump(text, allow_unicode=True, width=1 << 20).splitlines()[0]
