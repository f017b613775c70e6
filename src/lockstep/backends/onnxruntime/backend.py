"""The ONNX Runtime backend on a CPU.

Engine: the optimised graph, without weights (they are inputs), a few kilobytes.

Measured (hidden 1024, 8 layers, 2 cores): weights that become initializers at load are as fast as constants, weights
fed as inputs 1.8 times slower; sessions with separate thread pools are 8 times slower, hence the global one. Sessions
with separate arenas would each keep the scratch memory of their longest prompt.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.dtypes import has_8_bit_activations, is_fp8, named_dtype, onnx_dtype
from lockstep.artifacts.files import write_bytes
from lockstep.artifacts.quantized import is_data
from lockstep.artifacts.signature import IO
from lockstep.backends.base import Built
from lockstep.backends.cpu import thread_count
from lockstep.backends.host import Declared, HostBackend
from lockstep.backends.onnxruntime import heap
from lockstep.backends.onnxruntime.decode_layers import Part, past_of, stitch
from lockstep.backends.onnxruntime.row_bits import decoded_rows_keep_their_bits, rows_keep_their_bits
from lockstep.errors import CheckError, InputError
from lockstep.onnx_tools.sessions import E4M3, e4m3_value
from lockstep.step.executable import Call, check_bound
from lockstep.step.network import Network
from lockstep.weights import Tensors, WeightInputs, check_arrays, check_bound_slots, check_inputs, slot_array

_LEVELS = {
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_LARGE_BYTES = 1 << 20  # of an engine's weights: smaller ones fit into a cache
_HOLES_BYTES = 1 << 26  # of weights whose copies leave holes in the heap: the next engine reuses smaller ones
# Weights of a model whose decoding layers also become one graph, for which they are in memory twice. With larger
# weights a call's overhead is a small part of a step.
_STITCHED_BYTES = 512 << 20
_pool_threads: int | None = None


class OnnxRuntimeBackend(HostBackend):
    """ONNX Runtime's CPU provider.

    fp16 graphs are computed in fp32 with casts, as ONNX Runtime does on x86; bf16 does not load. w8a16 and w4a16 are
    computed in int8, on activations of 16 bits: int8_products.py. w8a8 and w4a8 are one int8 product, w8a8-fp8 one of
    float32.
    """

    name = "onnxruntime"
    polygraphy = "--onnxrt"
    suffixes = (".onnx",)
    revision = 8
    portable = True  # kernels are chosen when an engine is loaded
    precisions = ("fp32", "fp16", "w8a16", "w4a16", "w8a8", "w4a8", "w8a8-fp8")
    batch_invariant = True

    def is_batch_invariant(self, assembly: Assembly) -> bool:
        # Kernels of some quantised products depend on the CPU, so such products are run here.
        def open_product(model: bytes) -> ort.InferenceSession:
            return _session(model, session_options(_LEVELS["basic"]), "a product")

        quantized = assembly.quantization
        if quantized is None:
            return True
        if quantized.mxfp4:
            shapes = set[tuple[int, ...]]()
            for graph in assembly.classes.values():
                shapes.update(slot.sizes for slot in graph.signature.slots if is_data(slot.name))
            return all(
                decoded_rows_keep_their_bits((rows, groups * quantized.group_size), open_product)
                for _, rows, groups, _ in sorted(shapes)
            )
        if not has_8_bit_activations(assembly.precision) or is_fp8(assembly.precision):
            return True
        bits_of_weights = set(quantized.bits.values())
        return all(rows_keep_their_bits(bits, quantized.group_size, open_product) for bits in bits_of_weights)

    def version(self) -> str:
        return ort.__version__

    def default_options(self) -> dict[str, Any]:
        return {"optimization_level": "all", "fuse_projections": False}

    def build(self, graph_path: Path, out_path: Path, options: Mapping[str, Any]) -> Built:
        from lockstep.backends.onnxruntime.passes import rewrite  # the toolkit is needed only where engines are built

        level = options["optimization_level"]
        if level not in _LEVELS:
            raise InputError(f"optimization_level: expected one of {', '.join(sorted(_LEVELS))}, found {level!r}")
        settings = session_options(_LEVELS[level])
        out_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out_path.parent, prefix=f".{out_path.name}.", suffix=".tmp") as folder:
            saved = Path(folder) / "optimized.onnx"
            settings.optimized_model_filepath = str(saved)
            model = onnx.load(graph_path, load_external_data=False)
            rewritten = rewrite(model)
            source: str | bytes = str(graph_path)
            if rewritten is not model:
                source = rewritten.SerializeToString()
            try:
                _session(source, settings, f"{graph_path}: ONNX Runtime {ort.__version__} cannot build this graph")
            except CheckError as error:
                if "Protobuf serialization failed" in str(error):  # it cannot write `saved`
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out_path)) from None
                raise
            write_bytes(out_path, _canonical(saved.read_bytes()))
        return Built()

    def load(
        self, engine_path: Path, slots: Sequence[IO], threads: int | None, low_memory: bool, rank: int = 0
    ) -> OnnxRuntimeProgram:
        _use_global_pool(threads)
        return OnnxRuntimeProgram(_read(engine_path), slots, low_memory, engine_path)

    def decode_layers(self, network: Network, weights: Tensors) -> OnnxRuntimeExecutable | None:
        # A call of the library costs about as much as a small layer's products, so one call of all layers is faster.
        parts = list[Part]()
        slots = list[IO]()
        tensors = dict[str, Sequence[str]]()
        size = 0
        for number, (block, mixer) in enumerate(network.layers):
            engine = block.pieces[0].engine
            attention = mixer.engines["decode"]
            if not (isinstance(engine, OnnxRuntimeExecutable) and isinstance(attention, OnnxRuntimeExecutable)):
                return None  # several ranks: each block is pieces with all-reduces between them
            program, bound = engine.arguments
            if block.adapters or not attention.present or not program.stitches:
                return None
            prefix = f"{number}.block."
            size += program.size
            slots += [dataclasses.replace(slot, name=prefix + slot.name) for slot in program.slots]
            tensors |= {prefix + slot: names for slot, names in bound.items()}
            reads = {io.name: io.key for io in block.signature.inputs}
            writes = {io.name: io.key for io in block.signature.outputs}
            parts.append(Part(prefix, program.model, reads, writes))
            reads = {name: name for name in attention.inputs if name not in attention.present.values()}
            parts.append(Part(f"{number}.", attention.arguments.program.model, reads, {"attention": "attention"}))
        if size > _STITCHED_BYTES:
            return None
        model = stitch(parts, [io.key for io in network.exit.signature.inputs])
        return OnnxRuntimeProgram(model, slots, False, program.where.with_name("decode layers")).bind(weights, tensors)


BACKEND = OnnxRuntimeBackend


def _read(path: Path) -> onnx.ModelProto:
    try:
        return onnx.ModelProto.FromString(path.read_bytes())
    except Exception:  # protobuf's own error, of a package that comes with onnx
        raise InputError(
            f"{path}: expected an engine of ONNX Runtime, found a file that is none; build it again"
        ) from None


class OnnxRuntimeProgram:
    """An engine in memory; `bind` makes a session from it. size: of its weights, in bytes."""

    def __init__(self, model: onnx.ModelProto, slots: Sequence[IO], low_memory: bool, where: Path):
        self.where = where
        self.model = model
        self.slots = slots
        # int8 products need packed weights: without packing, the library dequantizes them to float32 at each step
        operators = {node.op_type for node in model.graph.node}
        has_products = "MatMulNBits" in operators
        self._low_memory = low_memory and not has_products
        self._decodes = "If" in operators  # codes of weights: onnx_tools/group_experts.py
        inputs = [value.name for value in model.graph.input]
        self._inputs = WeightInputs(slots, set(inputs))
        check_inputs(self._inputs.declared, inputs, str(where))
        self.size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._inputs.declared.values())
        self._on_huge_pages = has_products and self.size >= _LARGE_BYTES
        self._leaves_holes = self.size >= _HOLES_BYTES
        # Whether it may also be opened as a part of a larger graph; its weights are in memory twice then.
        self.stitches = not low_memory and not self._decodes

    def bind(self, weights: Tensors | None, slots: Mapping[str, Sequence[str]]) -> OnnxRuntimeExecutable:
        check_bound_slots(self._inputs.slots, slots, str(self.where))
        # Constant folding at load turns an fp16 block's weight casts into fp32 constants: twice as fast, twice the
        # weights' memory. It would also decode weights that are decoded at each run to save memory.
        level = "disabled"
        if slots and not self._low_memory and not self._decodes:
            level = "basic"
        settings = session_options(_LEVELS[level], self._low_memory)
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        values = {}
        if slots:
            assert weights is not None  # the caller's part: see Program.bind
            _inputs_to_initializers(model.graph, self._inputs.declared)
            arrays, inputs = self._inputs.bind(weights, slots, str(self.where))
            values = _place_weights(model.graph, settings, arrays, inputs, self._check)
        failure = f"{self.where}: ONNX Runtime {ort.__version__} cannot load this engine"
        session = _session(model.SerializeToString(), settings, failure)
        del values  # the session has copies
        if self._leaves_holes:
            heap.trim()
        if self._on_huge_pages:
            heap.collapse()
        return OnnxRuntimeExecutable(session, str(self.where), BindArguments(self, slots))

    def _check(self, slot: str, arrays: Sequence[np.ndarray]) -> None:
        check_arrays(arrays, *self._inputs.declared[slot], f"{self.where}: slot {slot}")


def _declared(values: Sequence[Any]) -> dict[str, Declared]:
    """Return {name: dtype and shape} of a session's inputs or outputs, whose types read "tensor(float)"."""
    declared = {}
    for value in values:
        element = value.type.removeprefix("tensor(").removesuffix(")")
        declared[value.name] = Declared(named_dtype(onnx_dtype(element)), value.shape)
    return declared


class BindArguments(NamedTuple):
    """What a session was created from, to open it once more as a part of a larger graph."""

    program: OnnxRuntimeProgram
    slots: Mapping[str, Sequence[str]]


class OnnxRuntimeExecutable:
    """An ONNX Runtime session on buffers. present: {output that is bound to an input: that input}."""

    def __init__(self, session: ort.InferenceSession, where: str, arguments: BindArguments):
        self._session = session
        self.where = where
        self.arguments = arguments
        self.inputs = _declared(session.get_inputs())
        outputs = _declared(session.get_outputs())
        self.present = {name: past for name in outputs if (past := past_of(name))}
        self.outputs = {name: value for name, value in outputs.items() if name not in self.present}

    def prepare(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Call:
        check_bound(inputs, self.inputs, self.where)
        check_bound(outputs, self.outputs, self.where)
        if not self.present:
            return self._call(inputs, outputs)
        pasts = {name: inputs[name] for name in self.present.values()}
        lengths = inputs["past_lengths"]
        room = next(iter(pasts.values())).shape[2]
        run = self._call_over(pasts, inputs, outputs)

        def call() -> None:
            """Run the session; where a cache is full, on copies that have room for one more token."""
            if max(lengths.tolist()) < room:  # a tenth of the time of NumPy's max
                run()
                return
            wider = {name: np.pad(past, ((0, 0), (0, 0), (0, 1), (0, 0))) for name, past in pasts.items()}
            self._call_over(wider, inputs, outputs)()
            for name, past in pasts.items():
                past[:] = wider[name][:, :, :room]

        return call

    def _call_over(
        self, pasts: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> Call:
        """Return a call of the session that puts new keys and values into `pasts`."""
        present = {name: pasts[past] for name, past in self.present.items()}
        return self._call({**inputs, **pasts}, {**outputs, **present})

    def _call(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Call:
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        run = self._session.run_with_iobinding

        def call(buffers: object = (*inputs.values(), *outputs.values())) -> None:
            """Run the session; `buffers` keeps the memory alive: a binding has addresses only."""
            try:
                run(binding)
            except Exception as error:  # ONNX Runtime's errors share no base class
                failure = f"ONNX Runtime {ort.__version__} cannot run this engine: {' '.join(str(error).split())}"
                raise CheckError(f"{self.where}: {failure}") from error

        return call


def _use_global_pool(threads: int | None) -> None:
    """Use one thread pool for all sessions, and one arena: ONNX Runtime takes both once.

    Raises InputError for another size.
    """
    global _pool_threads
    count = thread_count(threads)
    if _pool_threads is None:
        ort.set_global_thread_pool_sizes(count, 1)
        arena = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(arena, ort.OrtArenaCfg({}))
        _pool_threads = count
    elif threads is not None and count != _pool_threads:
        raise InputError(
            f"threads: expected {_pool_threads}, which this process already uses, found {count}; start a new process"
        )


def session_options(level: ort.GraphOptimizationLevel, low_memory: bool = False) -> ort.SessionOptions:
    _use_global_pool(None)
    settings = ort.SessionOptions()
    settings.use_per_session_threads = False
    settings.add_session_config_entry("session.use_env_allocators", "1")
    settings.graph_optimization_level = level
    # Errors only. It warns about saving hardware-specific graphs, but `device` in engines.json covers that.
    settings.log_severity_level = 3
    if low_memory:
        settings.add_session_config_entry("session.disable_prepacking", "1")
        settings.enable_cpu_mem_arena = False  # it would keep the casts of every layer's fp16 weights
    return settings


def _session(model: str | bytes, settings: ort.SessionOptions, failure: str) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise CheckError(f"{failure}: {' '.join(str(error).split())}") from error


def _canonical(data: bytes) -> bytes:
    """Return the model without producer, doc strings, metadata, and operator sets that it does not use."""
    model = onnx.ModelProto.FromString(data)
    for field in ("producer_name", "producer_version", "doc_string", "metadata_props"):
        model.ClearField(field)
    for item in (model.graph, *model.graph.node, *model.graph.input, *model.graph.output, *model.graph.value_info):
        item.ClearField("doc_string")
        item.ClearField("metadata_props")
    used = [entry for entry in model.opset_import if entry.domain in _domains(model.graph)]
    del model.opset_import[:]
    model.opset_import.extend(used)
    return model.SerializeToString(deterministic=True)


def _domains(graph: onnx.GraphProto) -> set[str]:
    domains = {""}
    for node in graph.node:
        domains.add(node.domain)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                domains |= _domains(attribute.g)
    return domains


def _inputs_to_initializers(graph: onnx.GraphProto, slots: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    activations = [value for value in graph.input if value.name not in slots]
    del graph.input[:]
    graph.input.extend(activations)
    for name, (shape, dtype) in slots.items():
        tensor = graph.initializer.add()
        tensor.name = name
        tensor.dims.extend(shape)
        tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(dtype)
        tensor.data_location = onnx.TensorProto.EXTERNAL


def _place_weights(
    graph: onnx.GraphProto,
    settings: ort.SessionOptions,
    weights: Tensors,
    slots: Mapping[str, Sequence[str]],
    check: Callable[[str, Sequence[np.ndarray]], None],
) -> dict[str, ort.OrtValue]:
    """Set the location of each slot's data, in initializers and settings.

    A slot of one tensor points into the weights' file, which ONNX Runtime maps itself: with prepacking off nothing is
    copied. `add_external_initializers` copies (a block's 46 MB), so it is used only for slots of several tensors, and
    for files whose path is not UTF-8.

    Returns the values that have to live until the session is created.
    """
    values: dict[str, ort.OrtValue] = {}
    in_files: dict[str, tuple[Path, int, int]] = {}
    for slot, names in slots.items():
        arrays = [weights[name] for name in names]
        check(slot, arrays)
        location = weights.location(names[0]) if len(names) == 1 else None
        if location is not None and location[1] % arrays[0].itemsize == 0 and _is_utf8(location[0]):
            in_files[slot] = location
            continue
        shape = next(tuple(tensor.dims) for tensor in graph.initializer if tensor.name == slot)
        array = slot_array(weights, names, shape)
        if array.dtype.name == E4M3:
            values[slot] = e4m3_value(array)
        else:
            values[slot] = ort.OrtValue.ortvalue_from_numpy(array)
    settings.add_external_initializers(list(values), list(values.values()))
    folder = Path("/")
    if in_files:  # ONNX Runtime allows one folder a session, with all files below it
        folder = Path(os.path.commonpath([path.parent for path, _, _ in in_files.values()]))
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    for tensor in graph.initializer:
        if tensor.name not in slots:
            continue
        if tensor.name in values:
            # The library finds these by name; it still wants a location with the right length.
            location = (folder / "memory", 0, values[tensor.name].tensor_size_in_bytes())
        else:
            location = in_files[tensor.name]
        path, offset, length = location
        for key, value in {"location": path.relative_to(folder), "offset": offset, "length": length}.items():
            tensor.external_data.add(key=key, value=str(value))
    return values


def _is_utf8(path: Path) -> bool:
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:  # Python decodes other bytes to half surrogate pairs
        return False
