"""The assembly of a model: its graphs, and the tensors that weight slots take.

`graphs/assembly.json` in and out: which graph each layer runs, and which tensors of the checkpoint each weight slot
takes. What is loaded is checked: types, ranges, and that it agrees with itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.artifacts import formats
from lockstep.artifacts.adapters import LORA_SLOTS, LoraSlots
from lockstep.artifacts.agreement import agrees
from lockstep.artifacts.dtypes import PRECISION_NAMES
from lockstep.artifacts.files import write_json
from lockstep.artifacts.graph_files import GRAPH, IO_SCHEMA, IOS, PHASES, VARIANT, AttentionVariant, GraphFile
from lockstep.artifacts.manifests import DIGEST, FILE, LARGEST, NAME, PRECISION, REMEDY, SIZE, TENSORS, read_checked
from lockstep.artifacts.quantized import QUANTIZED, QuantizedTensors
from lockstep.artifacts.schema import check, integer, items, mapping, one_of, optional, record
from lockstep.artifacts.signature import Signature
from lockstep.artifacts.tensor_parallel import TENSOR_PARALLEL, TensorParallel

_LAYERS = 10_000  # the deepest models have some hundred
_PART = record({"class": NAME, "slots": mapping(TENSORS, NAME)})
_ENTRY = optional(record({"file": FILE, "sha256": DIGEST}))
_TEXT_FILES = {"tokenizer": _ENTRY, "chat_template": _ENTRY}
_SCHEMA = record(
    {
        "precision": PRECISION,
        "dtype": one_of(*PRECISION_NAMES.values()),
        "hidden_size": SIZE,
        "vocab_size": SIZE,
        "num_layers": integer(1, _LAYERS),
        "classes": mapping(GRAPH, FILE),
        "kinds": mapping(VARIANT, FILE),
        "embedding": _PART,
        "layers": items(record({"block": _PART, "kind": NAME, "exit": _PART}), most=_LAYERS, least=1),
        "eos_token_ids": items(integer(0, LARGEST), most=10_000),
        "max_position_embeddings": optional(SIZE),
    },
    {
        **_TEXT_FILES,
        "model_type": NAME,
        "positions_limited_by": NAME,
        "tensor_parallel": TENSOR_PARALLEL,
        "adapters": LORA_SLOTS,
        "quantization": QUANTIZED,
        "residual": one_of("float32"),
        "batchful": record(
            {"graph": FILE, "sha256": DIGEST, "inputs": IOS, "outputs": IOS, "slots": items(IO_SCHEMA, 1_000_000)},
            {"tensors": mapping(TENSORS, NAME)},
        ),
    },
)


@dataclass(frozen=True)
class BoundBlock:
    """A block at its place in the model.

    graph: the class of its graph. slots: {weight slot: tensors of the checkpoint}.
    """

    graph: str
    slots: Mapping[str, Sequence[str]]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BoundBlock:
        return cls(value["class"], value["slots"])

    def to_json(self) -> dict[str, Any]:
        return {"class": self.graph, "slots": self.slots}


@dataclass(frozen=True)
class Layer:
    """A decoder layer: the block that ends at its attention, and the variant's name.

    exit: of a model that ends behind this layer.
    """

    block: BoundBlock
    variant: str
    exit: BoundBlock

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layer:
        return cls(BoundBlock.from_json(value["block"]), value["kind"], BoundBlock.from_json(value["exit"]))

    def to_json(self) -> dict[str, Any]:
        return {"block": self.block.to_json(), "kind": self.variant, "exit": self.exit.to_json()}


@dataclass(frozen=True)
class Uncut(GraphFile):
    """The whole model in one graph: {weight slot: tensors of the checkpoint} besides."""

    tensors: Mapping[str, Sequence[str]]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Uncut:
        return cls(value["graph"], value["sha256"], Signature.from_json(value), value.get("tensors", {}))

    def to_json(self) -> dict[str, Any]:
        return {"slots": [], **super().to_json(), "tensors": self.tensors}


@dataclass(frozen=True)
class FileEntry:
    """A file beside the assembly, and its sha256."""

    file: str
    sha256: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> FileEntry | None:
        return cls(value["file"], value["sha256"]) if value else None

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "sha256": self.sha256}


@dataclass(frozen=True)
class Assembly:
    """A model in split form.

    dtype: of weights and computation, as NumPy calls it. classes: the blocks' graphs by name. variants: attention by
    name ("kinds" in the file). max_position_embeddings: None where the model has no limit; positions_limited_by: which
    setting makes it, where that is another one. batchful: the whole model in one graph. tokenizer, chat_template: how
    text becomes tokens; None where the checkpoint has none. tensor_parallel: what several ranks run instead of the
    blocks and the attention; None for one. adapters: where blocks take them; None where they take none. quantization:
    which tensors are quantised, and how; None where none is. residual: the type of the residual stream, where that is
    another than `dtype`.
    """

    model_type: str
    precision: str
    dtype: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    classes: Mapping[str, GraphFile]
    variants: Mapping[str, AttentionVariant]
    embedding: BoundBlock
    layers: tuple[Layer, ...]
    batchful: Uncut | None
    positions_limited_by: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: FileEntry | None = None
    chat_template: FileEntry | None = None
    tensor_parallel: TensorParallel | None = None
    adapters: LoraSlots | None = None
    quantization: QuantizedTensors | None = None
    residual: str | None = None

    @property
    def hidden_dtype(self) -> str:
        """The type of the hidden state between blocks, as NumPy calls it."""
        return self.residual or self.dtype

    @classmethod
    def load(cls, path: str | os.PathLike) -> Assembly:
        """Read assembly.json.

        Raises InputError for a file that is none, or whose parts do not fit together.
        """
        value = read_checked(path, formats.ASSEMBLY, _SCHEMA)
        assembly = cls.from_json(value)
        check(assembly, lambda found, _: agrees(found, value["num_layers"]), path, REMEDY)
        return assembly

    def save(self, path: str | os.PathLike) -> None:
        write_json(path, self.to_json())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Assembly:
        """Take the content of an assembly.json that is known to be one."""
        batchful, ranks = value.get("batchful"), value.get("tensor_parallel")
        adapters, quantized = value.get("adapters"), value.get("quantization")
        return cls(
            model_type=value.get("model_type", ""),
            precision=value["precision"],
            dtype=value["dtype"],
            hidden_size=value["hidden_size"],
            vocab_size=value["vocab_size"],
            max_position_embeddings=value["max_position_embeddings"],
            classes={name: GraphFile.from_json(entry) for name, entry in value["classes"].items()},
            variants={name: AttentionVariant.from_json(entry) for name, entry in value["kinds"].items()},
            embedding=BoundBlock.from_json(value["embedding"]),
            layers=tuple(map(Layer.from_json, value["layers"])),
            batchful=Uncut.from_json(batchful) if batchful else None,
            positions_limited_by=value.get("positions_limited_by"),
            eos_token_ids=tuple(value["eos_token_ids"]),
            tokenizer=FileEntry.from_json(value.get("tokenizer")),
            chat_template=FileEntry.from_json(value.get("chat_template")),
            tensor_parallel=TensorParallel.from_json(ranks) if ranks else None,
            adapters=LoraSlots.from_json(adapters) if adapters else None,
            quantization=QuantizedTensors.from_json(quantized) if quantized else None,
            residual=value.get("residual"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of assembly.json, without its seal."""
        others = {
            "positions_limited_by": self.positions_limited_by,
            "batchful": self.batchful and self.batchful.to_json(),
            "tokenizer": self.tokenizer and self.tokenizer.to_json(),
            "chat_template": self.chat_template and self.chat_template.to_json(),
            "tensor_parallel": self.tensor_parallel and self.tensor_parallel.to_json(),
            "adapters": self.adapters and self.adapters.to_json(),
            "quantization": self.quantization and self.quantization.to_json(),
            "residual": self.residual,
        }
        return {
            "format": formats.ASSEMBLY,
            "model_type": self.model_type,
            "precision": self.precision,
            "dtype": self.dtype,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_layers": len(self.layers),
            "max_position_embeddings": self.max_position_embeddings,
            "classes": {name: graph.to_json() for name, graph in self.classes.items()},
            "kinds": {name: variant.to_json() for name, variant in self.variants.items()},
            "embedding": self.embedding.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
            "eos_token_ids": list(self.eos_token_ids),
            **{key: value for key, value in others.items() if value is not None},
        }

    def graphs(self) -> Iterator[tuple[str, GraphFile]]:
        """Yield (name, graph) of all graphs that run.

        Classes by name, attention as `<variant>.decode` and `<variant>.prefill`.
        """
        for name in sorted(self.classes):
            yield name, self.classes[name]
        for name in sorted(self.variants):
            for phase in sorted(PHASES):
                yield f"{name}.{phase}", self.variants[name].phases()[phase]

    def engine_graphs(self) -> Iterator[tuple[str, GraphFile]]:
        """Yield (name, graph) of all graphs that engines are built of.

        These are `graphs()`; of several ranks they are the embedding, and the pieces and the attention of a rank.
        """
        if self.tensor_parallel is None:
            yield from self.graphs()
        else:
            yield self.embedding.graph, self.classes[self.embedding.graph]
            yield from self.tensor_parallel.all_graphs()


def load_tokenizer(path: str | os.PathLike) -> FileEntry | None:
    """Return the assembly's tokenizer alone; None where it has none.

    Raises InputError for a file that is no assembly.
    """
    return FileEntry.from_json(_text_files(path).get("tokenizer"))


def load_chat_template(path: str | os.PathLike) -> FileEntry | None:
    """Return the assembly's chat template alone; None where it has none.

    Raises InputError for a file that is no assembly.
    """
    return FileEntry.from_json(_text_files(path).get("chat_template"))


def _text_files(path: str | os.PathLike) -> Mapping[str, Any]:
    return read_checked(path, formats.ASSEMBLY, record({}, _TEXT_FILES))
