"""The export stage: from a checkpoint's manifest to graphs and their assembly.

Out: assembly.json, block classes, attention, embedding, tokenizer, chat template, uncut batchful.onnx.

Reads the checkpoint's config.json, generation_config.json (for end-of-sequence ids) and files of tokenizer and chat
template. Of the weights it reads only the headers, if present, to reject wrong names and shapes before hours of work.
Two exports of one checkpoint are byte-identical. Needs torch and transformers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from transformers import PreTrainedModel

from lockstep.artifacts import chat_template
from lockstep.artifacts.assembly import Assembly, BoundBlock, Layer, Uncut
from lockstep.artifacts.checkpoint import RESOLVE_AGAIN, CheckpointManifest
from lockstep.artifacts.dtypes import GROUP_SIZE, HEAD_BITS, PRECISION_NAMES, QUANTIZATIONS, ROW, base_precision, is_fp8
from lockstep.artifacts.files import check_place, write_bytes
from lockstep.artifacts.graph_files import AttentionVariant, GraphFile, StateMixer
from lockstep.artifacts.places import FileEntry
from lockstep.artifacts.quantized import QuantizedTensors
from lockstep.artifacts.tensor_parallel import ShardedClass, ShardEntry, TensorParallel
from lockstep.checkpoint.auto_tokenizer import AutoTokenized, TokenizerError, load_auto
from lockstep.checkpoint.chat_template import read_chat_template
from lockstep.checkpoint.own_head import embedding_of_head
from lockstep.checkpoint.packed import packed_weights, unpacked_places
from lockstep.checkpoint.resolve import SIDE_FILES
from lockstep.checkpoint.stops import ids_of, stop_ids
from lockstep.checkpoint.tensors import find_tensors, has_weights
from lockstep.config.packing import check_precision, packing_of
from lockstep.errors import InputError
from lockstep.export import attention, state_mixer
from lockstep.export.canonical import Graph
from lockstep.export.checkpoint_layout import check_tensors
from lockstep.export.compose import ComposedBlock, compose
from lockstep.export.cut import Batchless, BatchlessGraph
from lockstep.export.lora import linear_layers, with_adapters
from lockstep.export.parity import check_parity
from lockstep.export.quantize import quantize
from lockstep.export.quiet import quiet
from lockstep.export.rope import position_limit
from lockstep.export.shards import shard_batchless, shard_block
from lockstep.export.tracer import meta_model
from lockstep.export.unique_layers import TracedModel, trace_unique_layers
from lockstep.manifests.digest_cache import check_stored
from lockstep.manifests.own_files import replacing, stale_files
from lockstep.onnx_tools.signature import signature_of

_REQUIRED = ("batchful.onnx", "embedding.onnx", "tokenizer.json")  # files of every export


@dataclass
class _Registry:
    """Names of distinct graphs, or of pairs of them, by digest: "middle", "middle_2" ..."""

    names: dict[Hashable, str] = field(default_factory=dict)
    graphs: dict[str, Graph] = field(default_factory=dict)

    def add(self, graph: Graph, label: str) -> str:
        name = self.name(graph.sha256, label)
        self.graphs.setdefault(name, graph)
        return name

    def name(self, key: Hashable, label: str) -> str:
        if key not in self.names:
            count = sum(name == label or name.startswith(f"{label}_") for name in self.names.values())
            self.names[key] = f"{label}_{count + 1}" if count else label
        return self.names[key]


def export(
    checkpoint: str | os.PathLike,
    precision: str,
    out: str | os.PathLike,
    tensor_parallel: int = 1,
    adapters: Mapping[str, Any] | None = None,
    group_size: int | None = None,
    residual: str | None = None,
    head_bits: int | None = None,
    activations: str | None = None,
    kv_cache_dtype: str | None = None,
) -> Path:
    """Export the model of the manifest `checkpoint` at `precision`.

    out: the path of assembly.json, which is returned; graphs are written to its folder. tensor_parallel: number of
    ranks. adapters: arguments of `lora.with_adapters`, for graphs that take adapters. group_size: numbers that share a
    scale in quantised precisions; None: 32, or the checkpoint's. residual: "float32" keeps the residual stream of a
    model of 16 bits in float32. head_bits: of the output head in quantised precisions, 4 or 8; None: 8. activations:
    "bfloat16" for engines of quantised weights that compute in it. kv_cache_dtype: "fp8" for a KV cache of e4m3
    numbers; no graph depends on it.

    Raises InputError for a model that cannot be split, with the reason, and for a quantised checkpoint of other bits or
    groups.
    """
    checkpoint = Path(checkpoint)
    out = Path(out)
    check_place(out)
    stale_files(out, _REQUIRED)  # fails now, not after minutes, if another export's files are in the way
    manifest = CheckpointManifest.load(checkpoint)
    folder = manifest.folder_of(checkpoint)
    config = manifest.config
    check_stored([file for file in manifest.files if file.path in SIDE_FILES], folder, RESOLVE_AGAIN)
    tokenizer = _load_tokenizer(folder)
    stops = tuple(stop_ids(folder, config, tokenizer.eos_token_id))
    quantized = manifest.quantization
    if quantized is not None and precision in QUANTIZATIONS:
        check_precision(quantized, precision, group_size, str(folder))
        group_size = quantized.group_size
    size = group_size or GROUP_SIZE
    files, assembly = graphs_of(
        config, precision, folder, tensor_parallel, adapters, size, quantized, residual, head_bits, activations
    )
    template = read_chat_template(folder)
    files["tokenizer.json"] = tokenizer.data or (folder / "tokenizer.json").read_bytes()

    def entry(name: str) -> FileEntry:
        return FileEntry(name, hashlib.sha256(files[name]).hexdigest())

    assembly = replace(assembly, eos_token_ids=stops, tokenizer=entry("tokenizer.json"), kv_cache_dtype=kv_cache_dtype)
    if template:
        files[chat_template.FILE] = template.to_bytes()
        assembly = replace(assembly, chat_template=entry(chat_template.FILE))
    _write(files, assembly, out)
    return out


def export_config(
    config: Mapping[str, Any],
    precision: str,
    folder: Path,
    tensor_parallel: int = 1,
    group_size: int = GROUP_SIZE,
    adapters: Mapping[str, Any] | None = None,
    residual: str | None = None,
    kv_cache_dtype: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Export a config.json mapping alone, without checkpoint and tokenizer.

    Graphs and assembly are written to `folder`. adapters: arguments of `lora.with_adapters`, for graphs that take
    adapters. Returns {file: size, sha256}.
    """
    files, assembly = graphs_of(config, precision, None, tensor_parallel, adapters, group_size, residual=residual)
    stops = tuple(ids_of(config.get("eos_token_id"), Path("config.json")))
    out = folder / "assembly.json"
    _write(files, replace(assembly, eos_token_ids=stops, kv_cache_dtype=kv_cache_dtype), out)
    files[out.name] = out.read_bytes()
    return {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}


def _write(files: Mapping[str, bytes], assembly: Assembly, out: Path) -> None:
    """Write files and `out`, replacing an earlier assembly's. Raises InputError for files of something else."""
    with replacing(out, set(files)) as stale:
        out.unlink(missing_ok=True)  # it is a record of files that are being replaced
        for path in stale:
            path.unlink()
        for name, data in sorted(files.items()):
            write_bytes(out.parent / name, data)
        assembly.save(out)


def graphs_of(
    config: Mapping[str, Any],
    precision: str,
    folder: Path | None = None,
    tensor_parallel: int = 1,
    adapters: Mapping[str, Any] | None = None,
    group_size: int = GROUP_SIZE,
    quantized: QuantizedTensors | None = None,
    residual: str | None = None,
    head_bits: int | None = None,
    activations: str | None = None,
) -> tuple[dict[str, bytes], Assembly]:
    """Return {name: graph file} of a model in a precision, and the assembly without tokenizer and stop ids.

    folder: of a checkpoint, whose tensors are checked against the model; the result does not depend on it. quantized:
    what the checkpoint has already quantised.
    """
    base = base_precision(precision)
    meta = meta_model(config, base)
    if folder is not None and has_weights(folder):
        tensors = embedding_of_head(folder, config, find_tensors(folder))
        packed = packed_weights(packing_of(config), tensors.tensors, folder)
        check_tensors(meta, replace(tensors, tensors=unpacked_places(tensors.tensors, packed)), folder)
        if is_fp8(precision) and quantized is None and packed:
            quantized = QuantizedTensors(ROW, dict.fromkeys(packed, 8))
    if residual is not None and precision not in ("fp16", "bf16"):
        raise InputError(f"residual: expected none in {precision}, found {residual}; it is for fp16 and bf16")
    # Quantised precisions are rewritten from float32 graphs, below.
    files, assembly = assemble(meta, config, base, tensor_parallel=tensor_parallel, residual=residual)
    # Before adapters and quantised weights, which transformers' model does not have.
    check_parity(config, meta, files, assembly, assemble)
    if adapters:
        files, assembly = with_adapters(files, assembly, adapters, linear_layers(meta))
    if precision in QUANTIZATIONS:
        return quantize(files, assembly, precision, group_size, quantized, head_bits or HEAD_BITS, activations)
    return files, assembly


def assemble(
    meta: PreTrainedModel,
    config: Mapping[str, Any],
    precision: str,
    tensor_parallel: int = 1,
    traced: TracedModel | None = None,
    residual: str | None = None,
) -> tuple[dict[str, bytes], Assembly]:
    """Return {name: graph file}, and the assembly without tokenizer and end-of-sequence ids."""
    traced = traced or trace_unique_layers(meta, residual is not None)
    classes = _Registry()
    mixers = _Mixers()
    layers = []
    blocks = []
    for index, layer in enumerate(traced.layers):
        label = "entry" if index == 0 else "middle"
        block = BoundBlock(classes.add(layer.block, label), layer.block_slots)
        variant = mixers.add(layer.batchless)
        exits = [BoundBlock(classes.add(graph, "exit"), slots) for graph, slots in layer.exits]
        layers.append(Layer(block, variant, exits[0] if exits else None, tuple(exits[1:])))
        blocks.append(ComposedBlock(layer.block, layer.block_slots, variant))
    last_exit, last_slots = traced.layers[-1].exits[-1]
    blocks.append(ComposedBlock(last_exit, last_slots, None))
    embedding = BoundBlock(classes.add(traced.embedding, "embedding"), traced.embedding_slots)
    batchful, batchful_slots = compose(blocks, mixers.functions)
    files = {"batchful.onnx": batchful}
    for name, graph in {**classes.graphs, **mixers.graphs}.items():
        files[f"{name}.onnx"] = graph.data
        onnx.checker.check_model(graph.proto, full_check=True)
    if residual is not None:
        _check_residual_dtype(classes.graphs, residual, config["model_type"])
    ranks = None
    if tensor_parallel > 1:
        rank_files, ranks = _shard(classes.graphs, mixers, layers, tensor_parallel)
        files |= rank_files
    hidden = traced.layers[0].block.signature.inputs[0]  # the first by INPUT_ORDER
    positions, limited_by = position_limit(meta.config)
    assembly = Assembly(
        model_type=config["model_type"],
        precision=precision,
        dtype=PRECISION_NAMES[precision],
        residual=residual,
        hidden_size=int(hidden.shape[1]),
        vocab_size=int(last_exit.signature.outputs[0].shape[1]),
        max_position_embeddings=positions,
        positions_limited_by=limited_by or None,
        classes={name: _file(graph, name) for name, graph in classes.graphs.items()},
        variants=mixers.variants,
        state_mixers=mixers.state_mixers,
        embedding=embedding,
        layers=tuple(layers),
        batchful=Uncut(
            "batchful.onnx",
            hashlib.sha256(batchful).hexdigest(),
            signature_of(onnx.ModelProto.FromString(batchful).graph, batchful_slots),
            batchful_slots,
        ),
        tensor_parallel=ranks,
    )
    return files, assembly


def _check_residual_dtype(graphs: Mapping[str, Graph], residual: str, model_type: str) -> None:
    """Check that the hidden state is `residual` between blocks: not so after a projection of the embedding."""
    for name, graph in graphs.items():
        for io in (*graph.signature.inputs, *graph.signature.outputs):
            if io.key == "hidden" and io.dtype != residual:
                raise InputError(
                    f"model type {model_type!r}: residual: expected a stream that goes from the embedding to the last "
                    f"norm, found a product in it (block {name}); leave residual out, and take bf16 or fp32"
                )


def _shard(
    classes: Mapping[str, Graph], mixers: _Mixers, layers: Sequence[Layer], degree: int
) -> tuple[dict[str, bytes], TensorParallel]:
    """Return the files of the graphs that `degree` ranks run, and their table."""
    batchless = {layer.variant: mixers.attention_of(layer.variant) for layer in layers}
    if any(graph.sinks for graph in batchless.values()):
        raise InputError("tensor_parallel: this model cannot be split: its attention has sinks; use one rank")
    pieces = _Registry()
    sharded = dict[str, ShardedClass]()
    variants = mixers.variants
    previous = ""
    # Of each block its class, the attention before it and the one after it: how a block is split depends on the heads
    # on both sides. Equal pieces share a name, the first one's: exits come last.
    neighbours = []
    for layer in layers:
        neighbours.append((layer.block.graph, previous, layer.variant))
        previous = layer.variant
    for layer in layers:
        neighbours += [(exit.graph, layer.variant, "") for exit in layer.exits]
    for name, before, after in dict.fromkeys(neighbours):
        shards = shard_block(classes[name], variants.get(before), variants.get(after), degree)
        entries = []
        for number, piece in enumerate(shards.pieces, 1):
            entries.append(ShardEntry(pieces.add(piece.graph, f"{name}.{number}"), piece.sums))
        entry = ShardedClass(tuple(entries), shards.values, shards.weights, shards.first_rank_slots)
        if sharded.setdefault(name, entry) != entry:
            raise InputError(f"tensor_parallel: the block {name} is between attentions with different heads")
    files = {f"{name}.onnx": graph.data for name, graph in pieces.graphs.items()}
    rank_variants = {}
    for name, batchless_graph in batchless.items():
        rank_attention = shard_batchless(batchless_graph, variants[name], degree)
        prefill = attention.prefill(rank_attention)
        decode = attention.decode(rank_attention)
        files |= {f"{name}.rank.prefill.onnx": prefill.data, f"{name}.rank.decode.onnx": decode.data}
        rank_variants[name] = replace(
            variants[name],
            num_heads=rank_attention.num_heads,
            num_kv_heads=rank_attention.num_kv_heads,
            prefill=_file(prefill, f"{name}.rank.prefill"),
            decode=_file(decode, f"{name}.rank.decode"),
        )
    for data in files.values():
        onnx.checker.check_model(onnx.ModelProto.FromString(data), full_check=True)
    table = {name: _file(graph, name) for name, graph in pieces.graphs.items()}
    return files, TensorParallel(degree, table, sharded, rank_variants)


class _Mixers:
    """The distinct token mixers of a model: prefill and decode graph, and the form without a past."""

    def __init__(self) -> None:
        self.names = _Registry()
        self.graphs: dict[str, Graph] = {}
        self.functions: dict[str, Graph] = {}
        self.variants: dict[str, AttentionVariant] = {}
        self.state_mixers: dict[str, StateMixer] = {}
        self.batchless: dict[str, Batchless] = {}
        self._name_by_id: dict[int, str] = {}

    def attention_of(self, name: str) -> BatchlessGraph:
        """Return the batchless graph of attention. Raises InputError for a mixer with a state."""
        batchless = self.batchless[name]
        if not isinstance(batchless, BatchlessGraph):
            raise InputError(
                "tensor_parallel: expected layers of attention, found layers with a state, which are not shared out "
                "yet; leave tensor_parallel out"
            )
        return batchless

    def add(self, batchless: Batchless) -> str:
        """Return the name of a mixer's graphs, which are built unless an equal mixer has them."""
        # Layers of one trace share the object, which saves building graphs; equal graphs of two traces share a name.
        if id(batchless) in self._name_by_id:
            return self._name_by_id[id(batchless)]
        if isinstance(batchless, BatchlessGraph):
            label = "attention"
            graphs = {"prefill": attention.prefill(batchless), "decode": attention.decode(batchless)}
        else:
            label = batchless.name
            graphs = {"prefill": state_mixer.prefill(batchless), "decode": state_mixer.decode(batchless)}
        name = self.names.name(tuple(graph.sha256 for graph in graphs.values()), label)
        self._name_by_id[id(batchless)] = name
        if name in self.batchless:
            return name
        self.batchless[name] = batchless
        self.graphs |= {f"{name}.{phase}": graph for phase, graph in graphs.items()}
        files = {phase: _file(graph, f"{name}.{phase}") for phase, graph in graphs.items()}
        if isinstance(batchless, BatchlessGraph):
            self.functions[name] = attention.without_cache(batchless)
            self.variants[name] = AttentionVariant(
                num_heads=batchless.num_heads,
                num_kv_heads=batchless.num_kv_heads,
                head_dim=batchless.head_dim,
                value_head_dim=batchless.value_head_dim,
                scale=batchless.scale,
                softcap=batchless.softcap,
                window=batchless.window,
                sinks=batchless.sinks,
                **files,
            )
        else:
            self.functions[name] = state_mixer.without_state(batchless)
            self.state_mixers[name] = StateMixer(batchless.state, batchless.inputs, **files)
        return name


def _file(graph: Graph, name: str) -> GraphFile:
    return GraphFile(f"{name}.onnx", graph.sha256, graph.signature)


def _load_tokenizer(folder: Path) -> AutoTokenized:
    try:
        with quiet():
            return load_auto(folder)
    except TokenizerError as error:
        raise InputError(f"{folder}: expected a tokenizer that transformers splits texts with, {error}") from None
