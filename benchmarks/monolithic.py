"""One with-past ONNX graph in one ONNX Runtime session, with weights as constants.

The contestant of the decode benchmark.

In: an assembly and its weights. Out: a `step` of one token for each of several requests. It is made from the uncut
batchful graph by giving each attention its cache, so both sides compute the same; what differs is one session instead
of one for each block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from lockstep import Assembly, Weights
from lockstep.artifacts.signature import IO
from lockstep.export.compose import DOMAIN
from lockstep.weights import slot_array


class Monolithic:
    """`num_requests` requests with `capacity` cache rows each, all at the same length."""

    def __init__(self, assembly_json: Path, weights_json: Path, num_requests: int, capacity: int):
        folder, assembly = Path(assembly_json).parent, Assembly.load(assembly_json)
        weights = Weights.open(weights_json)
        uncut = assembly.batchful
        model = with_past(onnx.load(folder / uncut.file), folder, assembly)
        arrays = {
            slot.name: slot_array(weights, uncut.tensors[slot.name], slot.sizes) for slot in uncut.signature.slots
        }
        _externalise(model.graph, arrays)
        settings = ort.SessionOptions()
        # the pool of the process, which the engine set of the same benchmark uses too
        settings.use_per_session_threads = False
        settings.add_external_initializers(
            list(arrays), [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(a)) for a in arrays.values()]
        )
        self._session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        (table,) = (weights[tensors[0]] for tensors in assembly.embedding.slots.values())
        self._table = table
        dtype, kinds = table.dtype, [assembly.variants[layer.variant] for layer in assembly.layers]
        self.length = 0
        self._rows = np.arange(num_requests)
        self._arrays = {
            "hidden": np.zeros((num_requests, assembly.hidden_size), dtype),
            "position_ids": np.zeros(num_requests, np.int64),
            "logit_rows": self._rows,
        }
        self._caches, self._new = [], []
        outputs = {"logits": np.zeros((num_requests, assembly.vocab_size), dtype)}
        for index, kind in enumerate(kinds):
            for name, dim in (("key", kind.head_dim), ("value", kind.value_head_dim)):
                cache = np.zeros((num_requests, kind.num_kv_heads, capacity, dim), dtype)
                new = np.zeros((num_requests, kind.num_kv_heads, dim), dtype)
                self._arrays[f"layer_{index}/past_{name}"], outputs[f"layer_{index}/{name}_out"] = cache, new
                self._caches.append(cache)
                self._new.append(new)
        self._arrays["past_lengths"] = self._arrays["position_ids"]
        self._binding = self._session.io_binding()
        for value in self._session.get_inputs():
            self._binding.bind_ortvalue_input(value.name, ort.OrtValue.ortvalue_from_numpy(self._arrays[value.name]))
        for value in self._session.get_outputs():
            self._binding.bind_ortvalue_output(value.name, ort.OrtValue.ortvalue_from_numpy(outputs[value.name]))
        self._logits = outputs["logits"]

    def step(self, token_ids: np.ndarray) -> np.ndarray:
        """Take a step: token_ids [num_requests] int64 in, logits out.

        Logits are [num_requests, vocab_size], the same array each time.
        """
        np.take(self._table, token_ids, axis=0, out=self._arrays["hidden"])
        self._arrays["position_ids"][:] = self.length
        self._session.run_with_iobinding(self._binding)
        for cache, new in zip(self._caches, self._new, strict=True):
            cache[:, :, self.length] = new
        self.length += 1
        return self._logits


def with_past(model: onnx.ModelProto, folder: Path, assembly: Assembly) -> onnx.ModelProto:
    """Give each attention of the uncut graph its cache, and the decode graph as body.

    The cache comes as inputs, its new keys and values go as outputs.
    """
    graph = model.graph
    for value in graph.input:
        if value.name in ("hidden", "position_ids"):
            value.type.tensor_type.shape.dim[0].dim_param = "num_requests"
    kinds = [layer.variant for layer in assembly.layers]
    declared = {
        name: {io.name: io for io in (*kind.decode.signature.inputs, *kind.decode.signature.outputs)}
        for name, kind in assembly.variants.items()
    }
    lengths = next(iter(declared.values()))["past_lengths"]
    graph.input.append(_info("past_lengths", lengths))
    nodes = [node for node in graph.node if node.domain == DOMAIN]
    for index, (node, kind) in enumerate(zip(nodes, kinds, strict=True)):
        call = dict(zip(("query", "key", "value", "position_ids"), node.input, strict=True)) | {
            "past_lengths": "past_lengths"
        }
        for name in ("past_key", "past_value"):
            call[name] = f"layer_{index}/{name}"
            graph.input.append(_info(call[name], declared[kind][name]))
        node.input[:] = [call[io.name] for io in assembly.variants[kind].decode.signature.inputs]
        node.output[:] = [node.output[0], f"layer_{index}/key_out", f"layer_{index}/value_out"]
        graph.output.extend(_info(f"layer_{index}/{name}", declared[kind][name]) for name in ("key_out", "value_out"))
    del model.functions[:]
    for name, kind in assembly.variants.items():
        body = onnx.load(folder / kind.decode.file).graph
        constants = [onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in body.initializer]
        inputs, outputs = [value.name for value in body.input], [value.name for value in body.output]
        model.functions.append(
            onnx.helper.make_function(DOMAIN, name, inputs, outputs, [*constants, *body.node], model.opset_import[:1])
        )
    return model


def _info(name: str, io: IO) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(
        name, onnx.helper.np_dtype_to_tensor_dtype(io.numpy_dtype), list(io.shape)
    )


def _externalise(graph: onnx.GraphProto, weights: Mapping[str, np.ndarray]) -> None:
    """Turn weight inputs into external-data placeholders.

    A session takes their values from memory.
    """
    kept = [value for value in graph.input if value.name not in weights]
    for value in [value for value in graph.input if value.name in weights]:
        tensor = graph.initializer.add(
            name=value.name, data_type=value.type.tensor_type.elem_type, data_location=onnx.TensorProto.EXTERNAL
        )
        tensor.dims.extend(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for key, text in (("location", "weights"), ("offset", "0"), ("length", str(weights[value.name].nbytes))):
            tensor.external_data.add(key=key, value=text)
    del graph.input[:]
    graph.input.extend(kept)
