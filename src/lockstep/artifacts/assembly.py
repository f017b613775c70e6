"""The assembly of a model: its graphs, and the tensors that weight slots take.

`graphs/assembly.json` in and out: which graph each layer runs, and which tensors of the checkpoint each weight slot
takes. Loading checks types, ranges, and that the parts fit together (`agreement`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.adapters import LoraSlots
from lockstep.artifacts.agreement import validate_assembly
from lockstep.artifacts.bounds import REMEDY, Count, FileName, Name, Names, Precision, Size
from lockstep.artifacts.document import Document, Key, Mark, length, one_of
from lockstep.artifacts.dtypes import PRECISION_NAMES
from lockstep.artifacts.graph_files import PHASES, AttentionVariant, GraphFile, StateMixer, TokenMixer
from lockstep.artifacts.places import FileEntry
from lockstep.artifacts.quantized import QuantizedTensors
from lockstep.artifacts.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class BoundBlock:
    """A block at its place: the class of its graph, and {weight slot: tensors of the checkpoint}."""

    graph: Annotated[Name, Key("class")]
    slots: Mapping[Name, Names]


@dataclass(frozen=True)
class Layer:
    """A token mixer's place: the block that ends at it, and the name of that variant or state mixer.

    exit: of a model that ends after this decoder layer; None where the layer goes on with another mixer. later_exits:
    of one that ends after each of the following layers that have no mixer.
    """

    block: BoundBlock
    variant: Annotated[Name, Key("kind")]
    exit: BoundBlock | None = None
    later_exits: tuple[BoundBlock, ...] = ()

    @property
    def exits(self) -> tuple[BoundBlock, ...]:
        if self.exit is None:
            return self.later_exits
        return self.exit, *self.later_exits

    @property
    def parts(self) -> tuple[BoundBlock, ...]:
        return self.block, *self.exits


@dataclass(frozen=True)
class Uncut(GraphFile):
    """The whole model in one graph: {weight slot: tensors of the checkpoint} besides."""

    tensors: Mapping[Name, Names] = field(default_factory=dict)


@dataclass(frozen=True)
class TextFiles(Document):
    """What an assembly.json says of text: its tokenizer and its chat template; None where it has none."""

    FORMAT: ClassVar[str] = formats.ASSEMBLY
    REMEDY: ClassVar[str] = REMEDY
    tokenizer: FileEntry | None = None
    chat_template: FileEntry | None = None


@dataclass(frozen=True)
class Assembly(Document):
    """A model in split form.

    dtype: NumPy's name of the dtype of weights and computation. classes: {name: graph of a block}. variants: {name:
    attention} ("kinds" in the file). state_mixers: {name: token mixer with a state}. max_position_embeddings: None
    where the model has no limit; positions_limited_by: which setting makes it, where that is another one. batchful: the
    whole model in one graph. tokenizer, chat_template: how text becomes tokens; None where the checkpoint has none.
    tensor_parallel: what several ranks run instead of the blocks and the attention; None for one. adapters: where
    blocks take them; None where they take none. quantization: which tensors are quantised, and how; None where none is.
    residual: the type of the residual stream, where that is another than `dtype`. activations: their type in engines of
    quantised weights whose backend computes in 16 bits; None: the backend's. kv_cache_dtype: "fp8" where keys and
    values are kept as e4m3 numbers with a scale for each token and head; None: as `dtype`.
    """

    FORMAT: ClassVar[str] = formats.ASSEMBLY
    REMEDY: ClassVar[str] = REMEDY
    COMPUTED: ClassVar[Mapping[str, str]] = {"num_layers": "num_layers"}
    precision: Precision
    dtype: Annotated[str, one_of(*PRECISION_NAMES.values())]
    hidden_size: Size
    vocab_size: Size
    max_position_embeddings: Size | None
    classes: Mapping[FileName, GraphFile]
    variants: Annotated[Mapping[FileName, AttentionVariant], Key("kinds")]
    embedding: BoundBlock
    layers: Annotated[tuple[Layer, ...], length(10_000, minimum=1)]  # the deepest models have some hundred
    eos_token_ids: Annotated[Annotated[tuple[Count, ...], length(10_000)], Mark.ALWAYS] = ()
    batchful: Uncut | None = None
    model_type: str = ""
    positions_limited_by: Name | None = None
    tokenizer: FileEntry | None = None
    chat_template: FileEntry | None = None
    tensor_parallel: TensorParallel | None = None
    adapters: LoraSlots | None = None
    quantization: QuantizedTensors | None = None
    residual: Annotated[str, one_of("float32")] | None = None
    activations: Annotated[str, one_of("bfloat16")] | None = None
    kv_cache_dtype: Annotated[str, one_of("fp8")] | None = None
    state_mixers: Mapping[FileName, StateMixer] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return sum(len(layer.exits) for layer in self.layers)

    @property
    def layer_numbers(self) -> list[int]:
        """Return the number of the decoder layer of each of `layers`: one with several mixers has several entries."""
        numbers = [0]
        for layer in self.layers[:-1]:
            numbers.append(numbers[-1] + len(layer.exits))
        return numbers

    def first_layers(self, count: int) -> tuple[Layer, ...]:
        """Return the entries of the first `count` decoder layers."""
        # Decoder layers without a mixer have no entry: their exits are the `later_exits` of the entry before them.
        return tuple(
            replace(layer, later_exits=layer.later_exits[: count - number - 1])
            for layer, number in zip(self.layers, self.layer_numbers)
            if number < count
        )

    def exit_of(self, layers: Sequence[Layer]) -> BoundBlock:
        """Return the exit after the last of `layers`, which are whole decoder layers."""
        # `validate_assembly` has checked that there is one.
        return layers[-1].exits[-1]

    @property
    def mixers(self) -> dict[str, TokenMixer]:
        return {**self.variants, **self.state_mixers}

    def float32_tensors(self) -> set[str]:
        """Return the tensors of the checkpoint that blocks take as float32, in 16 bits too."""
        tensors = set[str]()
        blocks = [self.embedding]
        for layer in self.layers:
            blocks += layer.parts
        for block in blocks:
            for slot in self.classes[block.graph].signature.slots:
                if slot.dtype == "float32":
                    tensors.update(block.slots[slot.name])
        return tensors

    @property
    def hidden_dtype(self) -> str:
        """Return the type of the hidden state between blocks, as NumPy calls it."""
        return self.residual or self.dtype

    def validate(self, stored: Mapping[str, Any]) -> None:
        validate_assembly(self, stored.get("num_layers"))

    def graphs(self) -> Iterator[tuple[str, GraphFile]]:
        """Yield (name, graph) of all that run: classes, then `<mixer>.decode` and `<mixer>.prefill`."""
        for name in sorted(self.classes):
            yield name, self.classes[name]
        for name, mixer in sorted(self.mixers.items()):
            for phase in sorted(PHASES):
                yield f"{name}.{phase}", mixer.phases()[phase]

    def engine_graphs(self) -> Iterator[tuple[str, GraphFile]]:
        """Yield (name, graph) of all that engines are built of, those of a rank where there are several."""
        if self.tensor_parallel is None:
            yield from self.graphs()
        else:
            yield self.embedding.graph, self.classes[self.embedding.graph]
            yield from self.tensor_parallel.all_graphs()
