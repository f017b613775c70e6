"""The typed configuration: a YAML file or Snakemake's merged mapping in, a frozen `Config` out, or one line on what is wrong.

`config/config.schema.json` and `config/README.md` are generated from the classes here (`python -m lockstep.configdoc`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, WithJsonSchema, model_validator,
)
from pydantic_core import PydanticCustomError

from lockstep.configerrors import Problem, Problems, describe, join, key_path, nearest, one_line
from lockstep.documents import read_document
from lockstep.errors import InputError
from lockstep.paths import Target
from lockstep.sources import RESERVED_PREFIXES, read_shape, resolve_source, source_folders

__all__ = ["BACKEND_PRECISIONS", "Config", "load", "resolve_source", "source_folders"]

Precision = Literal["fp32", "fp16", "bf16"]
# What each backend computes in, and why it lacks the others. A new backend is a new line here.
BACKEND_PRECISIONS: dict[str, tuple[str, ...]] = {"onnxruntime": ("fp32", "fp16")}
_BACKEND_LACKS = {"onnxruntime": "ONNX Runtime on CPU has no bf16 kernels"}
Backend = Literal[tuple(BACKEND_PRECISIONS)]  # type: ignore[valid-type]

INT32_MAX = 2**31 - 1  # dimensions and lengths are int32 in engines
# Names beside the models' folders in the results tree (lockstep.paths), which no model may take.
_RESERVED_NAMES = re.compile(r"config\.json|summary(\..*)?|report(\..*)?|logs|benchmarks", re.IGNORECASE)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _layer_count(value: Any) -> Any:
    if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= INT32_MAX):
        return value
    raise PydanticCustomError("layer_count", "a positive integer or the word all")


def _layer_key(value: Any) -> Any:
    """JSON and Snakemake's command line have text for keys: "2" is 2."""
    is_digits = isinstance(value, str) and re.fullmatch(r"[1-9][0-9]{0,9}", value)
    return _layer_count(int(value) if is_digits else value)


def _no_key_twice(value: Any) -> Any:
    if isinstance(value, dict) and len({str(key) for key in value}) < len(value):
        raise PydanticCustomError("repeated_key", "each layer count once")
    return value


def _number(value: Any) -> Any:
    """1e-4 is a number in YAML 1.2 and JSON, but text to PyYAML, which wants 1.0e-4."""
    is_number = isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}(\.[0-9]{0,20})?[eE][+-]?[0-9]{1,3}", value)
    return float(value) if is_number else value


def _folder(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(RESERVED_PREFIXES):
        raise PydanticCustomError("source", "a folder (only folders are supported yet)")
    return value


_LAYER_KEY_SCHEMA = {"type": "string", "pattern": "^([1-9][0-9]*|all)$"}
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
LayerCount = Annotated[Count | Literal["all"], BeforeValidator(_layer_count)]
LayerKey = Annotated[int | Literal["all"], BeforeValidator(_layer_key), WithJsonSchema(_LAYER_KEY_SCHEMA)]
ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Error = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
AsTuple = BeforeValidator(_as_tuple)


class Section(BaseModel):
    """A mapping of the config: no unknown keys, no conversion of types, nothing changes afterwards."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Prompt(Section):
    """A golden prompt."""

    text: str = Field(min_length=1, description="The prompt.")
    expected: Annotated[dict[LayerKey, str], BeforeValidator(_no_key_twice)] = Field(
        default={},
        description="The text that greedy decoding must give after the prompt, by layer count (one of the model's `layers`).",
    )


class Golden(Section):
    """What is decoded to compare an engine set with the reference."""

    max_new_tokens: Count = Field(default=16, description="How many tokens are decoded, greedily, after each prompt.")
    prompts: Annotated[tuple[Prompt, ...], AsTuple] = Field(
        min_length=1, description="The golden prompts. They are run in one batch and alone; take different lengths.",
    )


class ModelConfig(Section):
    """A checkpoint and the targets made of it: every combination of layer count, precision and backend."""

    source: Annotated[str, BeforeValidator(_folder)] = Field(
        min_length=1,
        description="The checkpoint: a Hugging Face model folder. A relative one is looked up from the working directory, "
        "then from the repository.",
    )
    layers: Annotated[tuple[LayerCount, ...], AsTuple] = Field(
        default=("all",), min_length=1,
        description="Layer counts: the first so many layers of the model, or the word `all`.",
    )
    precisions: Annotated[tuple[Precision, ...], AsTuple] = Field(
        default=("fp32",), min_length=1, description="Precisions of weights and computation.",
    )
    backends: Annotated[tuple[Backend, ...], AsTuple] = Field(
        default=("onnxruntime",), min_length=1,
        description="What builds and runs the engines. The first is meant where a target names none.",
    )
    golden: Golden = Field(description="Prompts, and what is expected of them.")


class Limits(Section):
    """Sizes that engines and caches are made for."""

    max_batch_size: Count = Field(default=4, description="Requests that are in flight together.")
    max_input_len: Count = Field(default=128, description="Tokens of one prompt.")
    max_seq_len: Count = Field(default=256, description="Tokens of one request, prompt and answer: the length of its KV cache.")
    max_num_tokens: Count = Field(default=512, description="Tokens of all requests that one step takes, packed.")


class Tolerance(Section):
    """The largest absolute errors that pass."""

    block: Error = Field(description="Largest absolute error of a block, a kind or a layer against torch in the same precision.")
    logits: Error = Field(description="Largest absolute error of the logits: whole forward, and golden check.")


class Fp32Tolerance(Tolerance):
    # Measured against transformers: 1e-5 on logits of standard deviation 1; sums in another order, ten times and more of room.
    block: Error = Field(default=1e-4, description=Tolerance.model_fields["block"].description)
    logits: Error = Field(default=1e-3, description=Tolerance.model_fields["logits"].description)


class Fp16Tolerance(Tolerance):
    # fp16 carries 11 bits. Measured 1e-2 on logits of standard deviation 1, the same as transformers' own fp16.
    block: Error = Field(default=2e-2, description=Tolerance.model_fields["block"].description)
    logits: Error = Field(default=5e-2, description=Tolerance.model_fields["logits"].description)


class Bf16Tolerance(Tolerance):
    # bf16 carries 8 bits, three fewer than fp16: eight times its errors.
    block: Error = Field(default=1.6e-1, description=Tolerance.model_fields["block"].description)
    logits: Error = Field(default=4e-1, description=Tolerance.model_fields["logits"].description)


class Tolerances(Section):
    """The largest absolute errors that pass, by precision."""

    fp32: Fp32Tolerance = Field(default=Fp32Tolerance(), description="For targets in fp32.")
    fp16: Fp16Tolerance = Field(default=Fp16Tolerance(), description="For targets in fp16.")
    bf16: Bf16Tolerance = Field(default=Bf16Tolerance(), description="For targets in bf16.")

    def __getitem__(self, precision: str) -> Tolerance:
        if precision not in get_args(Precision):
            raise KeyError(precision)
        return getattr(self, precision)


class Config(Section):
    """What is made: models, and for all of them limits and tolerances."""

    models: dict[ModelName, ModelConfig] = Field(
        min_length=1, description="The models by name. A name is also a folder in `results/`.",
    )
    limits: Limits = Field(default=Limits(), description="Sizes that engines and caches are made for.")
    tolerances: Tolerances = Field(default=Tolerances(), description="Largest absolute errors that pass, by precision.")

    @model_validator(mode="after")
    def _across_fields(self) -> Config:
        problems = [*_limit_problems(self.limits)]
        for name, model in self.models.items():
            problems += _model_problems(name, model, self.limits)
        if problems:
            raise Problems(problems)
        return self

    def targets(self) -> list[Target]:
        """All targets: models by name, then precisions, layer counts and backends in the order of the config."""
        return [
            Target(name, precision, layers, backend)
            for name, model in sorted(self.models.items())
            for precision in model.precisions
            for layers in model.layers
            for backend in model.backends
        ]

    def parse_target(self, text: str) -> Target:
        """The target named `<model>/<precision>/<layers>` (on the model's first backend) or with `/<backend>` after it.

        Raises InputError listing the targets there are.
        """
        by_name: dict[str, Target] = {}
        for target in self.targets():
            by_name[str(target)] = target
            by_name.setdefault(str(target).rpartition("/")[0], target)
        if text in by_name:
            return by_name[text]
        names = [str(target).rpartition("/")[0] for target in self.targets()]
        allowed = list(dict.fromkeys(names))
        more = f" (and {len(allowed) - 20} more)" if len(allowed) > 20 else ""
        guess = nearest(text, by_name).removeprefix(",")
        raise InputError(
            f"target: expected one of {', '.join(allowed[:20])}{more}; found {describe(text)}{';' + guess if guess else ''}"
        )

    def check_sources(
        self, folders: Sequence[str | os.PathLike] | None = None, where: str = "config",
    ) -> dict[str, Path]:
        """Hold the config against the `config.json` of each model; gives the checkpoint folder of each.

        `folders` is where relative sources are looked up (default: working directory, then repository), `where` opens the
        message. Raises InputError when a folder is not there, or is a model with fewer layers or positions than asked.
        """
        found: dict[str, Path] = {}
        problems: list[Problem] = []
        for name, model in self.models.items():
            try:
                found[name] = resolve_source(model.source, folders)
                problems += _shape_problems(name, model, self.limits, found[name])
            except InputError as error:
                problems.append(Problem(("models", name, "source"), str(error)))
        if problems:
            raise InputError(f"{where}: {join(Config, problems)}")
        return found

    def dump(self) -> dict[str, Any]:
        """Plain JSON types, with all defaults filled in; `load` of it gives the same config."""
        return self.model_dump(mode="json")


def load(config: str | os.PathLike | Mapping[str, Any], where: str | None = None) -> Config:
    """The config in a YAML (or `.json`) file, or in a mapping such as Snakemake's merged config.

    Raises InputError, one line that opens with `where` (default: the path, or `config` for a mapping) and names the first
    mistake: its key, what is expected and what was found.
    """
    if isinstance(config, Mapping):
        where, value = where or "config", dict(config)
    else:
        where, value = where or os.fspath(config), read_document(config)
    if value is None:
        raise InputError(f"{where}: expected a mapping of {', '.join(Config.model_fields)}; found an empty file")
    try:
        return Config.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{where}: {one_line(Config, error)}") from None


def _limit_problems(limits: Limits) -> Iterator[Problem]:
    if limits.max_input_len > limits.max_seq_len:
        text = f"expected at most max_seq_len ({limits.max_seq_len}); found {limits.max_input_len}"
        yield Problem(("limits", "max_input_len"), text)
    if limits.max_num_tokens < limits.max_batch_size:
        text = f"expected at least max_batch_size ({limits.max_batch_size}), a token for each request; found {limits.max_num_tokens}"
        yield Problem(("limits", "max_num_tokens"), text)


def _model_problems(name: str, model: ModelConfig, limits: Limits) -> Iterator[Problem]:
    here = ("models", name)
    if _RESERVED_NAMES.fullmatch(name):
        yield Problem(here, f"expected another name, for results/{name} is used for results; found {name!r}")
    for key in ("layers", "precisions", "backends"):
        items = getattr(model, key)
        for index, item in enumerate(items):
            if item in items[:index]:
                yield Problem((*here, key, index), f"expected each item once; found {item!r} again")
    for index, precision in enumerate(model.precisions):
        for backend in model.backends:
            if precision not in BACKEND_PRECISIONS[backend]:
                allowed = ", ".join(BACKEND_PRECISIONS[backend])
                text = f"expected one of {allowed} for backend {backend} ({_BACKEND_LACKS[backend]}); found {precision!r}"
                yield Problem((*here, "precisions", index), text)
    # The last token that is decoded is not fed back, so a prompt of one token still fits when both are equal.
    if model.golden.max_new_tokens > limits.max_seq_len:
        text = f"expected at most limits.max_seq_len ({limits.max_seq_len}); found {model.golden.max_new_tokens}"
        yield Problem((*here, "golden", "max_new_tokens"), text)
    for index, prompt in enumerate(model.golden.prompts):
        for key in prompt.expected:
            if key not in model.layers:
                text = f"expected one of the model's layers ({', '.join(map(str, model.layers))}) as the key; found {key!r}"
                yield Problem((*here, "golden", "prompts", index, "expected", key), text)


def _shape_problems(name: str, model: ModelConfig, limits: Limits, folder: Path) -> Iterator[Problem]:
    """`layers` and `limits` against the depth and the positions of the checkpoint in `folder`."""
    shape = read_shape(folder)
    depth, positions = shape.num_hidden_layers, shape.max_position_embeddings
    for index, layers in enumerate(model.layers):
        where = ("models", name, "layers", index)
        if layers != "all" and layers > depth:
            yield Problem(where, f"expected at most {depth} (num_hidden_layers in {folder / 'config.json'}) or all; found {layers}")
        if layers == depth and "all" in model.layers:
            yield Problem(where, f"expected each target once; found {layers}, which is all of this model's layers, beside all")
    if positions is not None and limits.max_seq_len > positions:
        text = f"expected at most {positions} (max_position_embeddings in {folder / 'config.json'}); found {limits.max_seq_len}"
        yield Problem(("limits", "max_seq_len"), text)
