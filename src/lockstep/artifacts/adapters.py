"""The manifest of a model's LoRA adapters, and the slots of graphs for them. `adapters.json` in and out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.bounds import Name, Size
from lockstep.artifacts.document import Document, Key, integers
from lockstep.artifacts.files import sha256_json
from lockstep.artifacts.places import StoredFile, StoredFiles, TensorPlace

# PEFT's names of an adapter's files.
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MASK = "adapter_mask."
IDS = "adapter_ids"  # the input of a block: each token's adapter slot, -1 for none
# The ends of names of the inputs that adapters' matrices are written to.
A_SUFFIX = ".lora_A"
B_SUFFIX = ".lora_B"
BETWEEN = " + "  # stands between the parts of an engine's slot, in its name
MAX_ADAPTERS = 256  # resident together
# Divisors of 128: kernels may cut a sum over all slots' ranks at its multiples, and an adapter must be in one piece.
RANKS = (8, 16, 32, 64, 128)


def mask_name(rank: int) -> str:
    """Return the name of an engine's input that takes a mask (onnx_tools/adapted_graphs.py) in place of `IDS`."""
    return f"{_MASK}{rank}"


def mask_rank(name: str) -> int:
    """Return the rank that a mask has room for per adapter; 0 for another input."""
    if not name.startswith(_MASK):
        return 0
    return int(name.removeprefix(_MASK))


def is_target(module: str, targets: Collection[str] | None) -> bool:
    """Return whether a module matches one of `targets` as in PEFT: its whole name or its end. None: all match."""
    return targets is None or any(module == target or module.endswith(f".{target}") for target in targets)


def rows_of(slot: str) -> list[str]:
    """Return the lora_A inputs, transposed, that are the last rows of a slot: the end of its name."""
    return [part for part in slot.split(BETWEEN) if part.endswith(A_SUFFIX)]


def fetched_manifest(adapter_sources: Path, name: str) -> Path:
    """Return the manifest of one fetched adapter. adapter_sources: that of all of a model."""
    return adapter_sources.with_suffix("") / name / "source.json"


@dataclass(frozen=True)
class LoraSlot:
    """The inputs of a block that take the adapters of one of its linear layers.

    a, b: the names of lora_A [in_features, max_adapters * max_lora_rank] and lora_B [max_adapters * max_lora_rank,
    out_features]. Both are transposed: PEFT's are [rank, in_features] and [out_features, rank].
    """

    a: Annotated[Name, Key("lora_A")]
    b: Annotated[Name, Key("lora_B")]
    in_features: Annotated[Size, Key("in")]
    out_features: Annotated[Size, Key("out")]


@dataclass(frozen=True)
class LoraSlots:
    """The inputs of all graphs that take adapters.

    classes: by block class, {weight slot of a linear layer: where its adapters go}. Of a quantised layer the weight
    slot is that of its integers.
    """

    max_adapters: Annotated[int, integers(1, MAX_ADAPTERS)]
    max_lora_rank: Annotated[int, integers(RANKS[0], RANKS[-1])]
    classes: Mapping[Name, Mapping[Name, LoraSlot]]

    @property
    def columns(self) -> int:
        """Return how many columns each lora_A input has, and rows each lora_B input: the ranks of all slots."""
        return self.max_adapters * self.max_lora_rank

    def names(self, graph: str) -> frozenset[str]:
        """Return the inputs of a block that adapters are written to."""
        return frozenset(name for name, _ in self.shapes(graph))

    def shapes(self, graph: str) -> Iterator[tuple[str, tuple[int, int]]]:
        for slot in self.classes.get(graph, {}).values():
            yield slot.a, (slot.in_features, self.columns)
            yield slot.b, (self.columns, slot.out_features)


@dataclass(frozen=True)
class AdapterSource:
    """Where an adapter was fetched from: the config's text for it, and the commit of its repository."""

    source: str
    commit: str


@dataclass(frozen=True)
class AdapterSources(Document):
    """The fetched adapters of a model, {name: source}, and all their files, relative to the manifest."""

    FORMAT: ClassVar[str] = formats.ADAPTER_SOURCES
    adapters: Mapping[str, AdapterSource]
    files: StoredFiles


@dataclass(frozen=True)
class AdaptedModule:
    """The matrices of a linear layer in the adapter's file: a [rank, in_features], b [out_features, rank]."""

    a: TensorPlace
    b: TensorPlace

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """One adapter, as PEFT saves it.

    source: the config's text for it. folder: of its files, relative to the manifest or absolute. rank: the largest of
    its modules. scale: of the product of its two matrices; scales: of modules that have another. base_model: what its
    config says that it was trained on. modules: by name of the linear layer (`model.layers.0.self_attn.q_proj`).
    commit: of the repository that it was fetched from; "" for a folder.
    """

    source: str
    folder: str
    files: tuple[StoredFile, ...]
    rank: int
    scale: float
    base_model: str
    modules: Mapping[str, AdaptedModule]
    commit: str = ""
    scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Return the hex sha256 of all that decides what the adapter computes."""
        tensors = next(file.sha256 for file in self.files if file.path == WEIGHTS)
        content: dict[str, Any] = {"tensors": tensors, "scale": self.scale}
        # Written only where there are some, as older locks have digests from before there were any.
        if self.scales:
            content["scales"] = dict(self.scales)
        return sha256_json(content)


@dataclass(frozen=True)
class AdaptersManifest(Document):
    """The adapters of a model, {name: adapter}."""

    FORMAT: ClassVar[str] = formats.ADAPTERS
    adapters: Mapping[str, Adapter]

    def folder_of(self, path: Path, name: str) -> Path:
        """Return the folder of an adapter. path: of this manifest."""
        return path.parent / self.adapters[name].folder
