"""cuDNN's front end over the fake device: attention over pages, in NumPy."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np

from fake_gpu.device import POISON, Gpu


class Tensor(SimpleNamespace):
    """A tensor of a graph of cuDNN, hashed as the object that it is."""

    __hash__ = object.__hash__

    def _set(self, **values):
        vars(self).update(values)
        return self

    set_output = lambda self, value: self
    set_dim = lambda self, dim: self._set(dim=dim)
    set_stride = lambda self, stride: self._set(stride=stride)
    set_data_type = lambda self, kind: self._set(data_type=kind)


def cudnn(gpu: Gpu) -> ModuleType:
    module = ModuleType("cudnn")

    class Graph:
        def __init__(self, **settings):
            self.handle = settings["handle"]

        def tensor(self, **settings):
            return Tensor(**settings)

        def sdpa(self, **settings):
            self.asked, self.out = SimpleNamespace(**settings), Tensor()
            return self.out, None

        def get_workspace_size(self):
            return 512

        def execute(self, addresses, workspace, handle):
            gpu.plain += not gpu.capturing(handle["stream"])
            gpu.put(handle["stream"], lambda: attend(gpu, self.asked, self.out, addresses, workspace))

        validate = build_operation_graph = check_support = build_plans = lambda self: None
        create_execution_plans = lambda self, modes: None

    vars(module).update(
        create_handle=dict,
        destroy_handle=lambda handle: None,
        set_stream=lambda handle, stream: handle.update(stream=stream),
        pygraph=Graph,
        backend_version=lambda: 91900,
        cudnnGraphNotSupportedError=type("cudnnGraphNotSupportedError", (Exception,), {}),
        heur_mode=SimpleNamespace(A=0),
        diagonal_alignment=SimpleNamespace(BOTTOM_RIGHT=1),
        data_type=SimpleNamespace(HALF="f2", BFLOAT16="bf16", FLOAT="f4", INT32="i4"),
    )
    return module


def attend(gpu: Gpu, asked: SimpleNamespace, out: Tensor, addresses: dict, workspace: int) -> None:
    """Attention over pages, of packed queries [requests, tokens, heads, dim]; all rows are touched, those behind a
    request's tokens are spoiled."""
    gpu.bytes(workspace, 512)[:] = POISON
    (requests, heads, tokens, dim), (_, kv_heads, page, value_dim) = asked.q.dim, asked.v.dim
    read = lambda tensor, shape: gpu.array(addresses[tensor], shape, tensor.data_type)
    query, result = read(asked.q, (requests, tokens, heads, dim)), read(out, (requests, tokens, heads, value_dim))
    keys, values = read(asked.k, asked.k.dim), read(asked.v, asked.v.dim)
    new, held = (read(tensor, (requests,)) for tensor in (asked.seq_len_q, asked.seq_len_kv))
    table = read(asked.paged_attention_k_table, (requests, asked.paged_attention_k_table.dim[2]))
    window = getattr(asked, "diagonal_band_left_bound", None)
    for request in range(requests):
        count, length = int(new[request]), int(held[request])
        pages = table[request, : -(-length // page)]
        k, v = (
            cache[pages]
            .swapaxes(1, 2)
            .reshape(-1, kv_heads, cache.shape[3])[:length]
            .astype(np.float32)
            .repeat(heads // kv_heads, axis=1)
            for cache in (keys, values)
        )
        scores = np.einsum("ihd,jhd->hij", query[request, :count].astype(np.float32), k) * asked.attn_scale
        at, past = length - count + np.arange(count)[:, None], np.arange(length)[None]
        seen = past <= at if hasattr(asked, "diagonal_band_right_bound") else np.ones((count, length), bool)
        seen = seen if window is None else seen & (past > at - window)
        scores = np.where(seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result[request] = np.nan
        result[request, :count] = np.einsum("hij,jhd->ihd", shares / shares.sum(axis=-1, keepdims=True), v)
