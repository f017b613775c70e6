"""The tree under `results/`, the names of targets, and the limits of what runs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import overload

MOST_RANKS = 16  # that a model is split over


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
    """Return a layer count as it stands in names: "2" is 2, "all" stays."""
    return text if text == "all" else int(text)


def is_quantized(precision: str) -> bool:
    """Return whether weights are integers or codes with scales, by name: w8a16, w4a8, w8a8-fp8 ..."""
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


# The rounding of each precision, in units of fp16's, of what is not in the weights. fp32 is 2^13 times finer in one
# rounding, but a sum of thousands of numbers rounds at each of them, in another order in each library: 2^5 for that.
# Engines with integer weights cut activations in parts that are finer than 16 bits: on two CPU backends their errors
# are 0.03 of fp16's for the demo, and 0.1 for all layers of SmolLM2, whose groups have outliers.
# Where activations are of 8 bits, the noise is measured on a model that rounds them too. A difference of any size makes
# another integer the nearest one somewhere, and layers later as many as fp16's: so it is fp16's, undivided.
ROUNDING = {
    "fp32": 2**-8,
    "fp16": 1.0,
    "bf16": 8.0,
    "w8a16": 2**-2,
    "w4a16": 2**-2,
    "w8a8": 1.0,
    "w4a8": 1.0,
    "w8a8-fp8": 1.0,
}
# How many times what a precision costs may one number be off? An engine's roundings are other ones than those that were
# measured: of a row of logits up to 1.6 times (fp16) and 4 times (bf16) are seen.
NOISE = 6.0
# The error of an engine beside its own graph on the same inputs, relative to the size of what comes out: other orders
# of accumulation (fp32: 6e-5 is seen), and rounding where one of the two libraries has none (fp16: 4e-3 is seen).
BESIDE_GRAPH = {
    "fp32": 1e-4,
    "fp16": 1e-2,
    "bf16": 8e-2,
    # A quarter of fp16's, as `ROUNDING` has it: a part of an activation is as fine as the largest of its group is. Of
    # rows with outliers 1.24e-3 is seen (SmolLM2).
    "w8a16": 2.5e-3,
    "w4a16": 2.5e-3,
    # Now and then a value is nearest to another integer, which is 1/127 of the row's largest away: 0.0144 is seen.
    "w8a8": 5e-2,
    "w4a8": 5e-2,
    "w8a8-fp8": 0.4,  # now and then an activation is nearest to another e4m3 number, 1/16 away: 0.22 is seen in fp16
}


@dataclass(frozen=True)
class Tolerances:
    """The errors that pass.

    block: of a block, an attention or a layer, relative to the size of the values. logits: of a logit, absolute. None:
    so many times (`noise`) what the precision itself costs on the model, which is measured in fp16 and is `rounding`
    times as much (`verify.noise`).
    """

    block: float | None = None
    logits: float | None = None
    noise: float = NOISE
    rounding: float = ROUNDING["fp32"]

    @classmethod
    def of(cls, precision: str) -> Tolerances:
        """Return those of a precision by default."""
        return cls(rounding=ROUNDING[precision])

    @property
    def beside_graph(self) -> float:
        """Return the error that passes of an engine beside its graph, relative to the size of what comes out."""
        precision = next(name for name, rounding in ROUNDING.items() if rounding == self.rounding)
        return BESIDE_GRAPH[precision] if self.block is None else self.block


WILDCARDS = ("model", "precision", "layers", "backend")  # of paths, in the order of a target's name


def wildcards_of(pattern: str) -> tuple[str, ...]:
    return tuple(name for name in WILDCARDS if f"{{{name}}}" in pattern)


@dataclass(frozen=True)
class Artefact:
    """What lies in a results tree: `tree.golden(model, precision, layers, backend)` is its path, those that it has."""

    pattern: str

    def __call__(self, tree: Results, *names: int | str) -> Path:
        return tree.root / self.pattern.format(**dict(zip(wildcards_of(self.pattern), names, strict=True)))

    @overload
    def __get__(self, tree: None, owner: type) -> Artefact: ...
    @overload
    def __get__(self, tree: Results, owner: type) -> Callable[..., Path]: ...
    def __get__(self, tree: Results | None, owner: type) -> Artefact | Callable[..., Path]:
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
    # Of targets whose weights are quantised: of the same weights, dequantised.
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
        """Return the reference that engines are held against.

        Of quantised weights their own, else that of the model.
        """
        if is_quantized(precision):
            return self.quantized_reference(model, precision, layers)
        return self.reference(model, layers)

    def drift(self, model: str, precision: str, layers: int | str) -> Path:
        return self.reference_of(model, precision, layers).with_name(f"{layers}.drift.json")

    def target_page(self, target: Target) -> Path:
        return self.target_pages() / (f"{target}".replace("/", "-") + ".html")
