"""A small Llama written by hand: its assembly (graphs as ONNX text), its weights, and its forward in float64 numpy.

The runtime's tests use it where they must know what each number is; no torch, no exporter. Block inputs are the weight slots.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from lockstep.files import sha256_file, write_json

EPSILON = 1e-5
THETA = 10000.0


@dataclass(frozen=True)
class Shape:
    """The hyperparameters of the hand-made Llama."""

    hidden: int = 32
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 48
    vocab: int = 64
    precision: str = "fp32"
    max_positions: int = 4096

    @property
    def dtype(self) -> np.dtype:
        return np.dtype({"fp32": np.float32, "fp16": np.float16}[self.precision])

    @property
    def onnx_type(self) -> str:
        return {"fp32": "float", "fp16": "float16"}[self.precision]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensor name -> shape, in Hugging Face's names and layout."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"model.embed_tokens.weight": (self.vocab, h), "model.norm.weight": (h,), "lm_head.weight": (self.vocab, h)}
        for i in range(self.layers):
            p = f"model.layers.{i}."
            shapes |= {p + "self_attn.q_proj.weight": (q, h), p + "self_attn.k_proj.weight": (kv, h)}
            shapes |= {p + "self_attn.v_proj.weight": (kv, h), p + "self_attn.o_proj.weight": (h, q)}
            shapes |= {p + "mlp.gate_proj.weight": (self.ffn, h), p + "mlp.up_proj.weight": (self.ffn, h)}
            shapes |= {p + "mlp.down_proj.weight": (h, self.ffn)}
            shapes |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
        return shapes


def random_weights(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights whose logits have a standard deviation of about one, so that errors and gaps have a scale."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, dims in sorted(shape.weight_shapes().items()):
        values = rng.standard_normal(dims, np.float32)
        values = 1 + 0.1 * values if len(dims) == 1 else values / np.float32(np.sqrt(dims[-1]))
        weights[name] = values.astype(shape.dtype)
    return weights


# --- graphs -----------------------------------------------------------------------------------------------------------------

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def norm_text(out: str, x: str, weight: str, shape: Shape) -> str:
    return f"""
    {out}_f = Cast<to=1>({x})
    {out}_two = Constant<value = float {{2}}>()
    {out}_sq = Pow({out}_f, {out}_two)
    {out}_axes = Constant<value_ints = [-1]>()
    {out}_mean = ReduceMean<keepdims=1>({out}_sq, {out}_axes)
    {out}_eps = Constant<value = float {{{EPSILON}}}>()
    {out}_var = Add({out}_mean, {out}_eps)
    {out}_root = Sqrt({out}_var)
    {out}_inv = Reciprocal({out}_root)
    {out}_n = Mul({out}_f, {out}_inv)
    {out}_c = CastLike({out}_n, {x})
    {out} = Mul({weight}, {out}_c)"""


def before_attention_text(p: str, x: str, w: dict[str, str], shape: Shape) -> str:
    """norm, q/k/v -> {p}query, {p}key, {p}value"""
    return norm_text(p + "xn", x, w["input_layernorm"], shape) + "".join(
        f"\n    {p}{out} = Gemm<transB=1>({p}xn, {w[slot]})"
        for out, slot in [("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")]
    )


def after_attention_text(p: str, x: str, attention: str, w: dict[str, str], out: str, shape: Shape) -> str:
    """output projection, residual, norm, MLP, residual -> out"""
    return (
        f"\n    {p}o = Gemm<transB=1>({attention}, {w['o_proj']})\n    {p}res = Add({x}, {p}o)"
        + norm_text(p + "mn", p + "res", w["post_attention_layernorm"], shape)
        + f"""
    {p}g = Gemm<transB=1>({p}mn, {w["gate_proj"]})
    {p}gs = Sigmoid({p}g)
    {p}ga = Mul({p}g, {p}gs)
    {p}u = Gemm<transB=1>({p}mn, {w["up_proj"]})
    {p}gu = Mul({p}ga, {p}u)
    {p}d = Gemm<transB=1>({p}gu, {w["down_proj"]})
    {out} = Add({p}res, {p}d)"""
    )


def rotary_text(p: str, flat: str, out: str, heads: int, shape: Shape) -> str:
    half = shape.head_dim // 2
    return f"""
    {p}shape = Constant<value_ints = [-1, {heads}, {shape.head_dim}]>()
    {p}x = Reshape({flat}, {p}shape)
    {p}lo0 = Constant<value_ints = [0]>()
    {p}lo1 = Constant<value_ints = [{half}]>()
    {p}hi1 = Constant<value_ints = [{shape.head_dim}]>()
    {p}ax = Constant<value_ints = [2]>()
    {p}a = Slice({p}x, {p}lo0, {p}lo1, {p}ax)
    {p}b = Slice({p}x, {p}lo1, {p}hi1, {p}ax)
    {p}nb = Neg({p}b)
    {p}turned = Concat<axis=-1>({p}nb, {p}a)
    {p}l = Mul({p}x, {p}cos)
    {p}r = Mul({p}turned, {p}sin)
    {out} = Add({p}l, {p}r)""".replace(f"{p}cos", "cos").replace(f"{p}sin", "sin")


def positions_text(shape: Shape) -> str:
    """position_ids -> cos, sin [n, 1, head_dim] in the graph's dtype"""
    inv = 1.0 / THETA ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)
    inv = np.concatenate([inv, inv]).astype(np.float32)
    return f"""
    inv = Constant<value = float[1,1,{shape.head_dim}] {{{", ".join(repr(float(x)) for x in inv)}}}>()
    pos_axes = Constant<value_ints = [1, 2]>()
    pos_f = Cast<to=1>(position_ids)
    pos_u = Unsqueeze(pos_f, pos_axes)
    angle = Mul(pos_u, inv)
    cos_f = Cos(angle)
    sin_f = Sin(angle)
    cos = CastLike(cos_f, query)
    sin = CastLike(sin_f, query)"""


def decode_text(p: str, past_k: str, past_v: str, out: str, shape: Shape) -> str:
    """One new token a request: {p}query/key/value [R, flat] -> out [R, heads*head_dim], {p}key_out, {p}value_out"""
    group, d, kv = shape.heads // shape.kv_heads, shape.head_dim, shape.kv_heads
    return (
        rotary_text(p + "qr_", p + "query", p + "q3", shape.heads, shape)
        + rotary_text(p + "kr_", p + "key", p + "key_out", kv, shape)
        + f"""
    {p}kvshape = Constant<value_ints = [-1, {kv}, {d}]>()
    {p}value_out = Reshape({p}value, {p}kvshape)
    {p}qshape = Constant<value_ints = [-1, {kv}, {group}, {d}]>()
    {p}q3f = Cast<to=1>({p}q3)
    {p}q4 = Reshape({p}q3f, {p}qshape)
    {p}qt = Transpose<perm=[0, 1, 3, 2]>({p}q4)
    {p}pkf = Cast<to=1>({past_k})
    {p}spt = MatMul({p}pkf, {p}qt)
    {p}sp = Transpose<perm=[0, 1, 3, 2]>({p}spt)
    {p}three = Constant<value_ints = [3]>()
    {p}two = Constant<value_ints = [2]>()
    {p}kf = Cast<to=1>({p}key_out)
    {p}k4 = Unsqueeze({p}kf, {p}three)
    {p}sn = MatMul({p}q4, {p}k4)
    {p}s0 = Concat<axis=-1>({p}sp, {p}sn)
    {p}scale = Constant<value = float {{{d**-0.5!r}}}>()
    {p}s = Mul({p}s0, {p}scale)
    {p}capv = Shape<start=2, end=3>({past_k})
    {p}cap = Squeeze({p}capv)
    {p}zero = Constant<value = int64 {{0}}>()
    {p}unit = Constant<value = int64 {{1}}>()
    {p}end = Add({p}cap, {p}unit)
    {p}j = Range({p}zero, {p}end, {p}unit)
    {p}one = Constant<value_ints = [1]>()
    {p}len = Unsqueeze(past_lengths, {p}one)
    {p}old = Less({p}j, {p}len)
    {p}new = Equal({p}j, {p}cap)
    {p}ok = Or({p}old, {p}new)
    {p}onetwo = Constant<value_ints = [1, 2]>()
    {p}oku = Unsqueeze({p}ok, {p}onetwo)
    {p}low = Constant<value = float {{-3.0e38}}>()
    {p}masked = Where({p}oku, {p}s, {p}low)
    {p}pr = Softmax<axis=-1>({p}masked)
    {p}zerov = Constant<value_ints = [0]>()
    {p}endv = Add({p}capv, {p}one)
    {p}pp = Slice({p}pr, {p}zerov, {p}capv, {p}three)
    {p}pn = Slice({p}pr, {p}capv, {p}endv, {p}three)
    {p}pvf = Cast<to=1>({past_v})
    {p}op = MatMul({p}pp, {p}pvf)
    {p}vf = Cast<to=1>({p}value_out)
    {p}v4 = Unsqueeze({p}vf, {p}two)
    {p}on = Mul({p}pn, {p}v4)
    {p}o4 = Add({p}op, {p}on)
    {p}oshape = Constant<value_ints = [-1, {shape.heads * d}]>()
    {p}of = Reshape({p}o4, {p}oshape)
    {out} = CastLike({p}of, {p}query)"""
    )


def prefill_text(shape: Shape) -> str:
    """Several tokens of one request behind its past: causal over the past (masked by past_lengths) and the new tokens."""
    group, d, kv = shape.heads // shape.kv_heads, shape.head_dim, shape.kv_heads
    return (
        rotary_text("qr_", "query", "q3", shape.heads, shape)
        + rotary_text("kr_", "key", "key_out", kv, shape)
        + f"""
    kvshape = Constant<value_ints = [-1, {kv}, {d}]>()
    value_out = Reshape(value, kvshape)
    qshape = Constant<value_ints = [0, {kv}, {group}, {d}]>()
    q3f = Cast<to=1>(q3)
    q4 = Reshape(q3f, qshape)
    q5 = Transpose<perm=[1, 2, 0, 3]>(q4)
    zerov = Constant<value_ints = [0]>()
    one = Constant<value_ints = [1]>()
    pk = Squeeze(past_key, zerov)
    pv = Squeeze(past_value, zerov)
    kt = Transpose<perm=[1, 0, 2]>(key_out)
    vt = Transpose<perm=[1, 0, 2]>(value_out)
    kall0 = Concat<axis=1>(pk, kt)
    vall0 = Concat<axis=1>(pv, vt)
    kall1 = Cast<to=1>(kall0)
    vall1 = Cast<to=1>(vall0)
    kall2 = Unsqueeze(kall1, one)
    vall = Unsqueeze(vall1, one)
    kall = Transpose<perm=[0, 1, 3, 2]>(kall2)
    s0 = MatMul(q5, kall)
    scale = Constant<value = float {{{d**-0.5!r}}}>()
    s = Mul(s0, scale)
    zero = Constant<value = int64 {{0}}>()
    unit = Constant<value = int64 {{1}}>()
    capv = Shape<start=2, end=3>(past_key)
    cap = Squeeze(capv)
    nv = Shape<start=0, end=1>(query)
    n = Squeeze(nv)
    j = Range(zero, cap, unit)
    old = Less(j, past_lengths)
    oldu = Unsqueeze(old, zerov)
    oshape2 = Concat<axis=0>(nv, capv)
    oldx = Expand(oldu, oshape2)
    i = Range(zero, n, unit)
    iu = Unsqueeze(i, one)
    causal = GreaterOrEqual(iu, i)
    ok = Concat<axis=1>(oldx, causal)
    low = Constant<value = float {{-3.0e38}}>()
    masked = Where(ok, s, low)
    pr = Softmax<axis=-1>(masked)
    o5 = MatMul(pr, vall)
    o4 = Transpose<perm=[2, 0, 1, 3]>(o5)
    oshape = Constant<value_ints = [0, {shape.heads * d}]>()
    of = Reshape(o4, oshape)
    attention = CastLike(of, query)"""
    )


def _io(name: str, dtype: str, dims: list) -> dict:
    return {"name": name, "dtype": dtype, "shape": dims}


def _signature(ios: list[dict]) -> str:
    kinds = {"float32": "float", "float16": "float16", "int64": "int64"}
    return ", ".join(f"{kinds[io['dtype']]}[{','.join(map(str, io['shape']))}] {io['name']}" for io in ios)


def _save(folder: Path, name: str, ins: list[dict], slots: list[dict], outs: list[dict], body: str) -> dict:
    text = f"{HEADER}{name} ({_signature(ins + slots)}) => ({_signature(outs)}) {{{body}\n}}"
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / f"{name}.onnx")
    return {"graph": f"{name}.onnx", "sha256": sha256_file(folder / f"{name}.onnx"), "inputs": ins, "slots": slots, "outputs": outs}


BEFORE = ["input_layernorm", "q_proj", "k_proj", "v_proj"]
AFTER = ["o_proj", "post_attention_layernorm", "gate_proj", "up_proj", "down_proj"]


def tensor_name(layer: int, slot: str) -> str:
    part = {"_proj": "self_attn." if slot[0] in "qkvo" else "mlp.", "norm": ""}["_proj" if slot.endswith("_proj") else "norm"]
    if slot in ("gate_proj", "up_proj", "down_proj"):
        part = "mlp."
    return f"model.layers.{layer}.{part}{slot}.weight"


def write_assembly(folder: Path, shape: Shape = Shape(), eos: tuple[int, ...] = (), tokenizer: str | None = None) -> Path:
    """Write graphs and assembly.json of a hand-made Llama; give the path of assembly.json."""
    folder.mkdir(parents=True, exist_ok=True)
    t = {"float": "float32", "float16": "float16"}[shape.onnx_type]
    dims, h, q, kv, d = shape.weight_shapes(), shape.hidden, shape.heads * shape.head_dim, shape.kv_heads, shape.head_dim
    slot = lambda name: _io(name, t, list(dims[tensor_name(0, name)]))
    hidden = _io("hidden", t, ["num_tokens", h])
    attention = _io("attention", t, ["num_tokens", q])
    qkv = [_io("query", t, ["num_tokens", q]), _io("key", t, ["num_tokens", kv * d]), _io("value", t, ["num_tokens", kv * d])]
    w = {s: s for s in BEFORE + AFTER}
    after = after_attention_text("", "hidden", "attention", w, "hidden_out", shape)
    rename = lambda body, pairs: _rename(body, pairs)
    classes = {
        "embedding": _save(folder, "embedding", [_io("token_ids", "int64", ["num_tokens"])],
                           [_io("embed_tokens", t, [shape.vocab, h])], [hidden], "\n    hidden = Gather(embed_tokens, token_ids)"),
        "entry": _save(folder, "entry", [hidden], [slot(s) for s in BEFORE], qkv, before_attention_text("", "hidden", w, shape)),
    }
    next_w = {s: s for s in BEFORE}
    middle_body = rename(after, {}) + before_attention_text("", "hidden_out", next_w, shape)
    classes["middle"] = _save(folder, "middle", [hidden, attention], [slot(s) for s in AFTER + BEFORE],
                              [dict(hidden, name="hidden_out"), *qkv], middle_body)
    norm_slot = _io("norm", t, [h])
    head_slot = _io("lm_head", t, [shape.vocab, h])
    classes["exit"] = _save(
        folder, "exit", [hidden, attention, _io("logit_rows", "int64", ["num_requests"])],
        [slot(s) for s in AFTER] + [norm_slot, head_slot], [_io("logits", t, ["num_requests", shape.vocab])],
        after + "\n    rows = Gather(hidden_out, logit_rows)" + norm_text("fn", "rows", "norm", shape)
        + "\n    logits = Gemm<transB=1>(fn, lm_head)")
    lengths = lambda n: _io("past_lengths", "int64", [n])
    past = lambda n: [_io("past_key", t, [n, kv, "past_capacity", d]), _io("past_value", t, [n, kv, "past_capacity", d]), lengths(n)]
    rows = lambda n: [dict(io, shape=[n, *io["shape"][1:]]) for io in qkv] + [_io("position_ids", "int64", [n])]
    outs = lambda n: [_io("attention", t, [n, q]), _io("key_out", t, [n, kv, d]), _io("value_out", t, [n, kv, d])]
    attention_kind = {
        "num_heads": shape.heads, "num_kv_heads": kv, "head_dim": d, "value_head_dim": d, "scale": d**-0.5, "softcap": 0.0, "window": 0,
        "prefill": _save(folder, "attention_prefill", rows("num_tokens") + past(1), [], outs("num_tokens"),
                         positions_text(shape) + prefill_text(shape)),
        "decode": _save(folder, "attention_decode", rows("num_requests") + past("num_requests"), [], outs("num_requests"),
                        positions_text(shape) + decode_text("", "past_key", "past_value", "attention", shape)),
    }
    for graph in (attention_kind["prefill"], attention_kind["decode"]):
        del graph["slots"]
    bind = lambda i, slots: {s: [tensor_name(i, s)] for s in slots}
    last = {"norm": ["model.norm.weight"], "lm_head": ["lm_head.weight"]}
    layers = [
        {
            "block": {"class": "middle" if i else "entry", "slots": (bind(i - 1, AFTER) if i else {}) | bind(i, BEFORE)},
            "kind": "attention",
            "exit": {"class": "exit", "slots": bind(i, AFTER) | last},
        }
        for i in range(shape.layers)
    ]
    assembly = {
        "format": "lockstep.assembly/1", "model_type": "llama", "precision": shape.precision, "dtype": t, "hidden_size": h,
        "vocab_size": shape.vocab, "num_layers": shape.layers, "max_position_embeddings": shape.max_positions,
        "eos_token_ids": list(eos), "classes": classes, "kinds": {"attention": attention_kind},
        "embedding": {"class": "embedding", "slots": {"embed_tokens": ["model.embed_tokens.weight"]}}, "layers": layers,
        "batchful": {"graph": "batchful.onnx", "sha256": "0" * 64},
    }
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)
        assembly["tokenizer"] = {"file": "tokenizer.json", "sha256": sha256_file(folder / "tokenizer.json")}
    write_json(folder / "assembly.json", assembly)
    return folder / "assembly.json"


def _rename(body: str, pairs: dict[str, str]) -> str:
    for old, new in pairs.items():
        body = body.replace(old, new)
    return body


# --- weights and reference --------------------------------------------------------------------------------------------------

_SAFETENSORS = {"float32": "F32", "float16": "F16"}


def write_weights(folder: Path, weights: dict[str, np.ndarray], precision: str) -> Path:
    """Write weights.safetensors and the weights manifest; give the manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    header, offset = {}, 0
    for name, array in sorted(weights.items()):
        header[name] = {"dtype": _SAFETENSORS[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "weights.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for _, array in sorted(weights.items())))
    start = 8 + len(text)
    tensors = {
        name: {"file": 0, "offset": start + e["data_offsets"][0], "length": e["data_offsets"][1] - e["data_offsets"][0], "dtype": e["dtype"], "shape": e["shape"]}
        for name, e in header.items()
    }
    files = [{"path": path.name, "size": path.stat().st_size, "sha256": sha256_file(path)}]
    write_json(folder / "weights.json", {"format": "lockstep.weights/1", "precision": precision, "files": files, "tensors": tensors})
    return folder / "weights.json"


def reference_logits(weights: dict[str, np.ndarray], shape: Shape, tokens, layers: int) -> np.ndarray:
    """Logits [len(tokens), vocab] of the whole sequence at once, in float64 numpy."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    n, d, kv = len(tokens), shape.head_dim, shape.kv_heads
    norm = lambda x, name: x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * w[name]
    inv = np.tile(1.0 / THETA ** (np.arange(0, d, 2) / d), 2)
    angle = (np.arange(n)[:, None] * inv)[:, None]

    def rotate(x):
        turned = np.concatenate([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * np.cos(angle) + turned * np.sin(angle)

    x = w["model.embed_tokens.weight"][np.asarray(tokens)]
    for i in range(layers):
        t = lambda slot: w[tensor_name(i, slot)]
        y = norm(x, tensor_name(i, "input_layernorm"))
        q = rotate((y @ t("q_proj").T).reshape(n, shape.heads, d)).reshape(n, kv, -1, d)
        k, v = rotate((y @ t("k_proj").T).reshape(n, kv, d)), (y @ t("v_proj").T).reshape(n, kv, d)
        s = np.einsum("ikgd,jkd->kgij", q, k) * d**-0.5
        s = np.where(np.tri(n, dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("kgij,jkd->ikgd", p, v).reshape(n, -1) @ t("o_proj").T
        y = norm(x, tensor_name(i, "post_attention_layernorm"))
        g = y @ t("gate_proj").T
        x = x + (g / (1 + np.exp(-g)) * (y @ t("up_proj").T)) @ t("down_proj").T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T
