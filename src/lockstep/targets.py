"""The tree under `results/`, the names of targets, and the limits of what runs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import overload

MAX_RANKS = 16  # of tensor parallelism


@dataclass(frozen=True)
class Target:
    """An engine set to be checked. A model at a precision, cut after `layers` layers (or "all"), on a backend."""

    model: str
    precision: str
    layers: int | str
    backend: str

    def __str__(self) -> str:
        return f"{self.model}/{self.precision}/{self.layers}/{self.backend}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target that `str` gave this text."""
        model, precision, layers, backend = text.split("/")
        return cls(model, precision, layer_count(layers), backend)


def layer_count(text: int | str) -> int | str:
    """Return the layer count of a name: "2" is 2, "all" stays."""
    return text if text == "all" else int(text)


def is_quantized(precision: str) -> bool:
    """Return whether a precision has weights of integers or codes with scales: w8a16, w4a8, w8a8-fp8 ..."""
    return re.fullmatch(r"w[0-9]+a[0-9]+(-fp8)?", precision) is not None


@dataclass(frozen=True)
class Limits:
    """Sizes that engines and caches are made for, with their only defaults.

    max_batch_size: requests in flight together. max_input_len: tokens of one prompt. max_seq_len: tokens of one
    request, prompt and answer: the length of its KV cache. max_num_tokens: tokens of all requests that one step takes,
    packed.
    """

    max_batch_size: int = 4
    max_input_len: int = 128
    max_seq_len: int = 256
    max_num_tokens: int = 512


WILDCARDS = ("model", "precision", "layers", "backend")  # of paths, in the order of a target's name


def wildcards_of(pattern: str) -> tuple[str, ...]:
    return tuple(name for name in WILDCARDS if f"{{{name}}}" in pattern)


@dataclass(frozen=True)
class Artefact:
    """A file of a results tree. `tree.golden(model, precision, layers, backend)` is its path."""

    pattern: str

    def __call__(self, tree: Results, *names: int | str) -> Path:
        return tree.root / self.pattern.format(**dict(zip(wildcards_of(self.pattern), names, strict=True)))

    @overload
    def __get__(self, tree: None, owner: type) -> Artefact: ...
    @overload
    def __get__(self, tree: Results, owner: type) -> Callable[..., Path]: ...
    def __get__(self, tree: Results | None, owner: type) -> Artefact | Callable[..., Path]:
        # Bound like a method: `Results.golden` is the artefact, `tree.golden` the function that returns its path.
        return self if tree is None else functools.partial(self, tree)


@dataclass(frozen=True)
class Results:
    """The results tree."""

    root: Path = Path("results")

    config = Artefact("config.json")
    source = Artefact("{model}/source.json")
    checkpoint = Artefact("{model}/checkpoint.json")
    architecture = Artefact("{model}/architecture.json")
    weights = Artefact("{model}/{precision}/weights.json")
    assembly = Artefact("{model}/{precision}/graphs/assembly.json")
    validation = Artefact("{model}/{precision}/validate/{layers}.json")
    engines = Artefact("{model}/{precision}/engines/{backend}/engines.json")
    reference = Artefact("{model}/reference/{layers}.json")
    # Of targets with quantised weights: the reference of these weights, dequantised.
    quantized_reference = Artefact("{model}/{precision}/reference/{layers}.json")
    golden = Artefact("{model}/{precision}/golden/{backend}/{layers}.json")
    speed = Artefact("{model}/{precision}/golden/{backend}/{layers}.speed.json")
    adapter_sources = Artefact("{model}/adapter_sources.json")
    adapters = Artefact("{model}/adapters.json")
    adapted_reference = Artefact("{model}/adapted_reference/{layers}.json")
    quantized_adapted_reference = Artefact("{model}/{precision}/adapted_reference/{layers}.json")
    reproduction = Artefact("{model}/{precision}/reproduce/{backend}/{layers}.json")
    summary = Artefact("summary.json")
    report_page = Artefact("report/index.html")
    target_pages = Artefact("report/targets")  # the folder of the targets' pages

    def reference_of(self, model: str, precision: str, layers: int | str) -> Path:
        """Return the reference of engines: of quantised weights their own, else that of the model."""
        if is_quantized(precision):
            return self.quantized_reference(model, precision, layers)
        return self.reference(model, layers)

    def quantization_error(self, model: str, precision: str, layers: int | str) -> Path:
        return self.reference_of(model, precision, layers).with_name(f"{layers}.quantization_error.json")

    def target_page(self, target: Target) -> Path:
        return self.target_pages() / (f"{target}".replace("/", "-") + ".html")
