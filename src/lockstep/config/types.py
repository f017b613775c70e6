"""The sections of the config as types: keys with types, bounds and defaults.

Each key has its meaning, too. `workflow/schemas/config.schema.yaml` and `config/README.md` are generated from them
(`python -m lockstep.config.doc`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, StringConstraints, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

from lockstep import targets
from lockstep.artifacts.adapters import MAX_ADAPTERS, RANKS
from lockstep.config.backends import backends
from lockstep.config.gguf_file import SUFFIX
from lockstep.config.section import INT32_MAX, UNIQUE, AsTuple, Count, Section, path_text
from lockstep.config.sources import RANDOM_PREFIX, SourceError, parse_source
from lockstep.tolerances import NOISE

_LIMITS = targets.Limits()

Precision = Literal["fp32", "fp16", "bf16", "w8a16", "w4a16", "w8a8", "w4a8", "w8a8-fp8"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
_NAME = "^[a-z][a-z0-9_]*$"
if TYPE_CHECKING:
    Backend: TypeAlias = str
else:  # a literal of names from a table is one at run time only
    Backend = Literal[tuple(backends())]
# A backend, or a device of the config, which names one; which there are, the whole config says.
BackendOrDevice = Annotated[
    str, WithJsonSchema({"anyOf": [{"enum": list(backends()), "type": "string"}, {"type": "string", "pattern": _NAME}]})
]


def _device_name(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(_NAME, value):
        raise PydanticCustomError("device_name", "a name of small letters, digits and '_' that opens with a letter")
    return value


DeviceName = Annotated[str, StringConstraints(pattern=_NAME, max_length=40), BeforeValidator(_device_name)]


def _layer_count(value: Any) -> Any:
    if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= INT32_MAX):
        return value
    raise PydanticCustomError("layer_count", "a positive integer or the word all")


def _layer_key(value: Any) -> Any:
    """Turn a key that is text into a layer count: "2" is 2. JSON and Snakemake's command line have text for keys."""
    if isinstance(value, str) and re.fullmatch(r"[1-9][0-9]{0,9}", value):
        value = int(value)
    return _layer_count(value)


def _no_key_twice(value: Any) -> Any:
    """Refuse the keys 2 and "2" in one mapping. They are the same layer count; the second would silently win."""
    if isinstance(value, dict):
        for key in value:
            if isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key) and int(key) in value:
                raise PydanticCustomError(
                    "whole", "expected each layer count once; found {key} as a number and as text", {"key": key}
                )
    return value


def _number(value: Any) -> Any:
    """Turn text such as 1e-4, a number in YAML 1.2 and JSON but not to PyYAML, into a number."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}(\.[0-9]{0,20})?[eE][+-]?[0-9]{1,3}", value):
        return float(value)
    return value


def _source(value: Any) -> Any:
    if isinstance(path_text(value), str):
        try:
            parse_source(value)
        except SourceError as error:
            raise PydanticCustomError("source", "{expected}", {"expected": error.expected}) from None
    return value


_LAYER_KEY_SCHEMA = {"type": "string", "pattern": "^([1-9][0-9]*|all)$"}
if TYPE_CHECKING:
    LayerCount: TypeAlias = int | str
    LayerKey: TypeAlias = int | str
else:  # `int | str` everywhere else in the package
    LayerCount = Annotated[Count | Literal["all"], BeforeValidator(_layer_count)]
    LayerKey = Annotated[int | Literal["all"], BeforeValidator(_layer_key), WithJsonSchema(_LAYER_KEY_SCHEMA)]
AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
LoraRank = Literal[8, 16, 32, 64, 128]
assert get_args(LoraRank) == RANKS
ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Error = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_number)]


class Prompt(Section):
    """A golden prompt."""

    text: str = Field(min_length=1, description="The prompt.")
    expected: Annotated[dict[LayerKey, str], BeforeValidator(_no_key_twice)] = Field(
        default={},
        description="The text that greedy decoding must give after the prompt, by layer count (one of the "
        "model's `layers`).",
    )


# The default: two lengths, so that a batch has both, which any model that has seen English can continue.
_PROMPTS = (Prompt(text="Once upon a time"), Prompt(text="The capital of France is a city on the river"))


class Golden(Section):
    """The prompts of the golden check, and how many tokens are decoded."""

    max_new_tokens: Count = Field(default=16, description="How many tokens are decoded, greedily, after each prompt.")
    prompts: Annotated[tuple[Prompt, ...], AsTuple] = Field(
        default=_PROMPTS,
        min_length=1,
        description="The golden prompts. They are run in one batch, alone, and in chunks "
        "among other requests; take different lengths.",
    )
    perplexity_text: str = Field(
        default="",
        description="A text on which the perplexity of quantised weights is compared with that of the checkpoint. "
        "Empty: the prompts, one after another.",
    )
    max_perplexity_change: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)] | None = Field(
        default=None,
        description="The most by which that perplexity may be above the checkpoint's, 0.05 for 5 %; a run ends with an "
        "error above it. None: any.",
    )
    long_prompt: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = Field(
        default=None,
        description="Tokens of one more prompt, made of pseudo-random ids, that shows what happens far into "
        "the KV cache; 0 leaves it out. "
        "None: as many as fill `limits.max_seq_len` together with `max_new_tokens`.",
    )


def _by_precision(name: str, doc: str, entry: Any, base: Any = Section) -> Any:
    """Return a section with an entry for each precision, whose names are no Python names."""
    fields: dict[str, Any] = {
        precision: (entry, Field(default=entry(), description=f"For targets in {precision}."))
        for precision in PRECISIONS
    }
    return create_model(name, __base__=base, __doc__=doc, __module__=__name__, **fields)


class OwnTolerance(Section):
    """Errors that pass for one model; a missing key is as for all models."""

    noise: Error | None = Field(default=None, description="Instead of that of all models, for this one.")


if TYPE_CHECKING:
    OwnTolerances: TypeAlias = Section
else:  # by precision
    OwnTolerances = _by_precision("OwnTolerances", "Errors that pass for one model, by precision.", OwnTolerance)


def _adapter_source(value: Any) -> Any:
    if isinstance(value, str) and (value.startswith(RANDOM_PREFIX) or value.endswith(SUFFIX)):
        raise PydanticCustomError("source", "the folder of an adapter, or hf:org/name@revision")
    return _source(value)


class AdapterConfig(Section):
    """A LoRA adapter of a model (docs/adapters.md)."""

    source: Annotated[str, BeforeValidator(_adapter_source)] = Field(
        min_length=1,
        description="The folder that PEFT saved, with adapter_config.json and adapter_model.safetensors, or "
        "`hf:org/name@revision`, an adapter on the hub. A relative path is looked up from the working directory, then "
        "from the repository.",
    )
    prompts: Annotated[tuple[Prompt, ...], AsTuple] = Field(
        default=(), description="The adapter's golden prompts; none: the texts of the model's."
    )


class ModelConfig(Section):
    """A checkpoint and its targets: all layer counts, precisions and backends."""

    source: Annotated[str, BeforeValidator(_source)] = Field(
        min_length=1,
        description="The checkpoint: a Hugging Face model folder; a GGUF file, `path/to/model.gguf`; "
        "`hf:org/name@revision`, a model on the hub; or `random:path/to/config.json?seed=0`, random weights. A "
        "relative path is looked up from the working directory, then from the repository.",
    )
    layers: Annotated[tuple[LayerCount, ...], AsTuple] = Field(
        default=("all",),
        min_length=1,
        json_schema_extra=UNIQUE,
        description="Layer counts: this many of the model's first layers, or the word `all`.",
    )
    precisions: Annotated[tuple[Precision, ...], AsTuple] = Field(
        default=("fp32",), min_length=1, json_schema_extra=UNIQUE, description="Precisions of weights and computation."
    )
    backends: Annotated[tuple[BackendOrDevice, ...], AsTuple] = Field(
        default=("onnxruntime",),
        min_length=1,
        json_schema_extra=UNIQUE,
        description="What builds and runs the engines: backends, and `devices`. The first is meant where a target "
        "names none.",
    )
    backend_precisions: dict[BackendOrDevice, Annotated[tuple[Precision, ...], AsTuple, Field(min_length=1)]] = Field(
        default={}, description="The precisions of one of the backends, where they are others than `precisions`."
    )
    group_size: Literal[16, 32, 64, 128] | None = Field(
        default=None,
        description="Of quantised weights: how many numbers of a row share a scale. It must divide the rows of "
        "all linear weights, and the part of them that each of several ranks takes. None: 32, or of a checkpoint that "
        "is quantised already its own.",
    )
    head_bits: Literal[4, 8] | None = Field(
        default=None,
        description="Of quantised weights: bits of the output head, and of an embedding that is tied to it. None: 8, "
        "or in floating point as a checkpoint that is quantised already has it.",
    )
    residual: Literal["float32"] | None = Field(
        default=None,
        description="In fp16 and bf16: `float32` keeps the residual stream, which runs through all layers, in float32, "
        "for models whose hidden state is beyond 65504, where float16 ends (Gemma 3), and for smaller errors in bf16. "
        "None: in 16 bits. In quantised precisions it is float32 as it is.",
    )
    activations: Literal["bfloat16"] | None = Field(
        default=None,
        description="On the backend `cuda`, in quantised precisions: `bfloat16` gives activations between products, "
        "keys and values the range of float32, for models whose branches exceed 65504; they round eight times as much. "
        "None: float16.",
    )
    kv_cache_dtype: Literal["fp8"] | None = Field(
        default=None,
        description="On the backend `cuda`: `fp8` keeps keys and values as e4m3 numbers, with a scale for each token "
        "and head, in half the memory; its error is among the results. None: in the type of the activations.",
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=targets.MAX_RANKS)] = Field(
        default=1,
        description="Ranks that each layer's heads, feed-forward sizes and vocabulary are split over. The same engines "
        "serve all ranks; each takes its part of the checkpoint's tensors.",
    )
    adapters: dict[AdapterName, AdapterConfig] = Field(
        default={}, description="LoRA adapters with their names. Requests of several, and of none, run in one batch."
    )
    max_adapters: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] = Field(
        default=4, description="Of a model with adapters: how many are resident, and may be in one batch."
    )
    max_lora_rank: LoraRank = Field(
        default=16, description="Of a model with adapters: the largest rank; 8, 16, 32, 64 or 128."
    )
    lora_target_modules: Annotated[tuple[str, ...], AsTuple, Field(min_length=1)] | None = Field(
        default=None,
        json_schema_extra=UNIQUE,
        description="Of a model with adapters: names of the linear layers that adapters may be of, such as `q_proj`; "
        "none: all linear layers of the decoder layers.",
    )
    golden: Golden = Field(default=Golden(), description="Prompts, and the expected answers.")
    tolerances: OwnTolerances = Field(
        default=OwnTolerances(), description="Where this model needs others than `tolerances` of all models."
    )

    def precisions_of(self, backend: str) -> tuple[str, ...]:
        """Return the precisions that are built for a backend, in the order of the config."""
        return self.backend_precisions.get(backend, self.precisions)

    def placed_precisions(self, backend: str) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield the same with the place of each, of keys and an index below the model."""
        place: tuple[str, ...] = ("precisions",)
        if backend in self.backend_precisions:
            place = ("backend_precisions", backend)
        for index, precision in enumerate(self.precisions_of(backend)):
            yield (*place, index), precision

    def all_precisions(self) -> list[str]:
        return list(dict.fromkeys([*self.precisions, *chain(*self.backend_precisions.values())]))


class Device(Section):
    """A type of device that engines are built and checked on (docs/devices.md). Targets are named by it."""

    backend: Backend = Field(description="The backend that it is used with.")
    gpu: str = Field(
        default="",
        description="Of a backend that runs on GPUs: the GPU's name as `nvidia-smi --query-gpu=name --format=csv` "
        "prints it. A job that finds another is refused.",
    )
    cpu: str = Field(
        default="", description="Of a backend that runs on CPUs: the architecture, such as `x86_64` or `aarch64`."
    )
    gpu_model: str = Field(
        default="",
        description="What the cluster calls the GPU: the resource `gpu_model` of its jobs, which Snakemake's Slurm "
        "executor asks for.",
    )

    @property
    def hardware(self) -> str:
        """Return the name that a job must find: of the GPU, or the CPU's architecture."""
        return self.gpu or self.cpu


class Endpoint(Section):
    """A server of OpenAI's API that must serve a model as published (docs/certify.md)."""

    url: str = Field(pattern="^https?://", description="Up to `/v1`, as `http://localhost:8000/v1`.")
    model: ModelName = Field(description="Which of `models` it serves; the reference of all its layers is the golden.")
    served_name: str = Field(min_length=1, description="The name that the endpoint has for the model.")
    requests: Count = Field(default=300, description="Requests to send at most.")
    rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="Requests a second at most; 0: any."
    )
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=60.0, description="Seconds of a request."
    )
    key_env: str = Field(default="OPENAI_API_KEY", description="The environment variable that holds the key, if set.")
    company: bool = Field(default=True, description="Send up to 65 requests at once, too.")


class Limits(Section):
    """Sizes that engines and caches are made for."""

    max_batch_size: Count = Field(default=_LIMITS.max_batch_size, description="Requests that are in flight together.")
    max_input_len: Count = Field(default=_LIMITS.max_input_len, description="Tokens of one prompt.")
    max_seq_len: Count = Field(
        default=_LIMITS.max_seq_len, description="Tokens of one request, prompt and answer: the length of its KV cache."
    )
    max_num_tokens: Count = Field(
        default=_LIMITS.max_num_tokens, description="Tokens of all requests that one step takes, packed."
    )

    def plain(self) -> targets.Limits:
        return targets.Limits(**self.model_dump())


class Tolerance(Section):
    """The errors that pass."""

    noise: Error = Field(
        default=NOISE,
        description="How many times what the precision itself costs on the model's weights and tokens, which is "
        "measured, one number may be off; their rms a third as many times. A smaller one is stricter.",
    )


class _Tolerances(Section):
    def __getitem__(self, precision: str) -> Tolerance:
        if precision not in PRECISIONS:
            raise KeyError(precision)
        return getattr(self, precision)


if TYPE_CHECKING:
    Tolerances: TypeAlias = _Tolerances
else:  # by precision
    Tolerances = _by_precision("Tolerances", "The errors that pass, by precision.", Tolerance, _Tolerances)

if TYPE_CHECKING:
    Backends: TypeAlias = Section
else:  # of the sections that the backends bring
    Backends = create_model(
        "Backends",
        __base__=Section,
        __doc__="Settings of each backend.",
        **{
            name: (settings.section, Field(default=settings.section(), description=settings.section.__doc__))
            for name, settings in backends().items()
            if settings.section is not None
        },
    )
