"""cuDNN's front end over the fake device: attention over pages, in NumPy."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from fake_gpu.device import POISON, Fault, Gpu


class Tensor(SimpleNamespace):
    """A tensor of a graph of cuDNN, hashed as the object that it is."""

    __hash__ = object.__hash__

    def _set(self, **values):
        vars(self).update(values)
        return self

    def set_output(self, value):
        return self

    def set_dim(self, dim):
        return self._set(dim=dim)

    def set_stride(self, stride):
        return self._set(stride=stride)

    def set_data_type(self, kind):
        return self._set(data_type=kind)

    def set_ragged_offset(self, offsets):
        return self._set(ragged_offset=offsets)

    def get_uid(self):
        return id(self)


def cudnn(gpu: Gpu) -> ModuleType:
    module = ModuleType("cudnn")

    class Graph:
        def __init__(self, **settings):
            self.handle = settings["handle"]

        def tensor(self, **settings):
            return Tensor(**settings)

        def sdpa(self, **settings):
            self.asked = SimpleNamespace(**settings)
            self.out = Tensor()
            self.log_sums = Tensor() if settings["generate_stats"] else None
            return self.out, self.log_sums

        def get_workspace_size(self):
            return 512

        def execute(self, addresses, workspace, handle):
            gpu.plain += not gpu.capturing(handle["stream"])
            gpu.put(handle["stream"], lambda: attend(gpu, self, addresses, workspace))

        def _accept(self, *modes):
            pass

        validate = build_operation_graph = create_execution_plans = check_support = build_plans = _accept

    vars(module).update(
        create_handle=dict, destroy_handle=lambda handle: None,
        set_stream=lambda handle, stream: handle.update(stream=stream), pygraph=Graph, backend_version=lambda: 91900,
        cudnnGraphNotSupportedError=type("cudnnGraphNotSupportedError", (Exception,), {}),
        heur_mode=SimpleNamespace(A=0), diagonal_alignment=SimpleNamespace(BOTTOM_RIGHT=1),
        data_type=SimpleNamespace(HALF="f2", BFLOAT16=ml_dtypes.bfloat16, FLOAT="f4", INT32="i4"),
    )  # fmt: skip
    return module


def attend(gpu: Gpu, graph: Any, addresses: dict, workspace: int) -> None:
    """Attention over pages, of queries [requests, tokens, heads, dim]: packed where they have offsets; else all rows
    are touched, and those after a request's tokens spoiled."""
    gpu.bytes(workspace, 512)[:] = POISON
    operation = graph.asked
    requests, heads, tokens, dim = operation.q.dim
    _, kv_heads, page, value_dim = operation.v.dim

    def read(tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
        return gpu.array(addresses[tensor.get_uid()], shape, tensor.data_type)

    def packed(tensor: Tensor, request: int, count: int, width: int) -> np.ndarray:
        """A request's tokens, [tokens or count, heads, width]; offsets [requests + 1] are in numbers."""
        place = addresses[tensor.get_uid()]
        size = np.dtype(tensor.data_type).itemsize
        if offsets := getattr(tensor, "ragged_offset", None):
            starts = read(offsets, (requests + 1,)).tolist()
            if starts != sorted(starts) or starts[request + 1] < starts[request] + count * heads * width:
                raise Fault(f"offsets {starts}: request {request} has {count} tokens of {heads * width} numbers")
            return gpu.array(place + starts[request] * size, (count, heads, width), tensor.data_type)
        if requests > 1:
            raise Fault("several requests without offsets")
        return gpu.array(place, (tokens, heads, width), tensor.data_type)

    keys = read(operation.k, operation.k.dim)
    values = read(operation.v, operation.v.dim)
    new, kv_lengths = (read(tensor, (requests,)) for tensor in (operation.seq_len_q, operation.seq_len_kv))
    table = read(operation.paged_attention_k_table, (requests, operation.paged_attention_k_table.dim[2]))
    window = getattr(operation, "diagonal_band_left_bound", None)
    for request in range(requests):
        count = int(new[request])
        length = int(kv_lengths[request])
        if not 0 < count <= tokens or count > length:
            raise Fault(f"{count} new tokens of {length}, at most {tokens} expected")
        query = packed(operation.q, request, count, dim)
        result = packed(graph.out, request, count, value_dim)
        pages = table[request, : -(-length // page)]
        k, v = (
            cache[pages]
            .swapaxes(1, 2)
            .reshape(-1, kv_heads, cache.shape[3])[:length]
            .astype(np.float32)
            .repeat(heads // kv_heads, axis=1)
            for cache in (keys, values)
        )
        scores = np.einsum("ihd,jhd->hij", query[:count].astype(np.float32), k) * operation.attn_scale
        at = length - count + np.arange(count)[:, None]
        past = np.arange(length)[None]
        is_visible = past <= at if hasattr(operation, "diagonal_band_right_bound") else np.ones((count, length), bool)
        is_visible = is_visible if window is None else is_visible & (past > at - window)
        scores = np.where(is_visible, scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result[:] = np.nan
        if graph.log_sums is not None:
            log_sums = read(graph.log_sums, (requests, heads, tokens))[request]
            log_sums[:] = np.nan
            log_sums[:, :count] = np.log(shares.sum(axis=-1)) + scores.max(axis=-1)
        result[:count] = np.einsum("hij,jhd->ihd", shares / shares.sum(axis=-1, keepdims=True), v)
