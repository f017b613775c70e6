"""Faults of the blocks: norms, activations, residuals, weights, precision; of the embedding and of row selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from faults.attention import rows_from
from faults.edit import Edit, Value
from faults.fault import (
    BEHIND,
    BLOCKS,
    EMBEDDING,
    ENTRY,
    EXIT,
    FLOATS,
    INTEGER_WEIGHTS,
    MIDDLE,
    Fault,
    change,
    replaced,
)  # fmt: skip
from faults.harm import Requests
from lockstep import Advance

Change = Callable[[Edit, Value], Value]


def norms(edit: Edit) -> list[tuple[NodeProto, NodeProto, NodeProto]]:
    """(Pow, ReduceMean, Add of eps) of each root mean square norm."""
    return [
        (edit.producer(mean.input[0]), mean, edit.reader(mean.output[0], "Add")) for mean in edit.nodes("ReduceMean")
    ]


@change
def eps(edit: Edit, factor: float) -> None:
    for _, _, add in norms(edit):
        place, value = edit.constant_of(add)
        edit.set_constant(add, place, value * factor)


def gain(edit: Edit) -> None:
    """Gemma multiplies with 1 + weight, in fp32."""
    for weight in [value.name for value in edit.graph.input if value.name.endswith("norm.weight")]:
        cast = next((node.output[0] for node in edit.readers(weight) if node.op_type == "Cast"), weight)
        edit.replace(edit.reader(cast, "Add").output[0], lambda value, cast=cast: cast)


def wrong_axis(edit: Edit) -> None:
    for _, mean, _ in norms(edit):
        edit.set_constant(mean, 1, np.array([0]))


def mean_subtracted(edit: Edit) -> None:
    for power, _, add in norms(edit):
        root = edit.reader(edit.reader(add.output[0], "Sqrt").output[0], "Reciprocal").output[0]
        readers = [power, edit.reader(root, "Mul")]
        edit.replace(power.input[0], lambda x: edit.op("Sub", x, edit.op("ReduceMean", x, edit.ints(-1))), readers)


def first_rows_norm(edit: Edit) -> None:
    for _, mean, _ in norms(edit):
        edit.replace(mean.output[0], lambda value: edit.op("Gather", value, edit.ints(0), axis=0))


def squares_in_fp16(edit: Edit) -> None:
    for power, _, _ in norms(edit):
        edit.replace(power.output[0], edit.rounded)


def silu_to_gelu(edit: Edit) -> None:
    gate = edit.result_of("gate_proj")
    edit.replace(edit.reader(gate, "Mul").output[0], lambda value: edit.op("Gelu", gate))


@change
def gelu_is(edit: Edit, operator: str) -> None:
    node = edit.nodes("Gelu")[0]
    edit.replace(node.output[0], lambda value: edit.op(operator, node.input[0]))


def gate_and_up(edit: Edit) -> None:
    gate, up = (edit.result_of(name) for name in ("gate_proj", "up_proj"))
    of_up = edit.readers(up)
    edit.replace(gate, lambda value: up)
    edit.replace(up, lambda value: gate, of_up)


@change
def residual(edit: Edit, projection: str, factor: float) -> None:
    """Take what the product of a projection is added to times `factor`."""
    product = edit.result_of(projection)
    add = edit.reader(product, "Add")
    other = next(name for name in add.input if name != product)
    edit.replace(other, lambda value: edit.times(value, factor), [add])


@change
def zero(edit: Edit, projection: str) -> None:
    edit.replace(edit.result_of(projection), lambda value: edit.times(value, 0.0))


@change
def weight(edit: Edit, slot: str, other: Change) -> None:
    edit.replace(edit.slot(slot), lambda value: other(edit, value))


def row_zero(row: int) -> Change:
    return lambda edit, value: edit.rows_where(value, edit.op("Equal", edit.numbers(value), row), 0)


def rows_rolled(edit: Edit, value: Value) -> Value:
    """Row i is row i-1: as if the first row had been read twice and the last dropped."""
    return edit.op("Gather", value, edit.before(edit.numbers(value)), axis=0)


def transposed(edit: Edit, value: Value) -> Value:
    """Read the bytes of [rows, columns] as [columns, rows], and transpose them then."""
    other = edit.op("Gather", edit.op("Shape", value), edit.ints(1, 0), axis=0)
    return edit.op("Transpose", edit.op("Reshape", value, other), perm=[1, 0])


@change
def in_fp16(edit: Edit, *projections: str) -> None:
    for projection in projections:
        node = edit.product(projection)
        for name in list(node.input[:2]):
            edit.replace(name, edit.rounded, [node])
        edit.replace(node.output[0], edit.rounded)


@change
def fp16_sums(edit: Edit, block: int) -> None:
    """Accumulate each product in pieces of `block`, in fp16: each piece and each sum is rounded."""
    widths = {value.name: value.type.tensor_type.shape.dim for value in edit.graph.input}
    for node in list(edit.nodes("Gemm")):
        x, right = node.input[:2]
        width = widths[right][1].dim_value

        def summed(value: Value, left_value: Value = x, right: Value = right, width: int = width) -> Value:
            total = None
            for low in range(0, width, block):
                place = edit.ints(low), edit.ints(min(low + block, width)), edit.ints(1)
                piece = edit.op("Gemm", *(edit.op("Slice", name, *place) for name in (left_value, right)), transB=1)
                piece = edit.rounded(piece)
                total = piece if total is None else edit.rounded(edit.op("Add", total, piece))
            return total

        edit.replace(node.output[0], summed)


@change
def bias(edit: Edit, factor: float, *slots: str) -> None:
    for slot in slots:
        edit.replace(edit.slot(f"{slot}.bias"), lambda value: edit.times(value, factor))


@change
def at_size(edit: Edit, count: int, output: Value, factor: float) -> None:
    """Take an output times `factor` in steps of exactly `count` rows."""

    def changed(value: Value) -> Value:
        return edit.op("Where", edit.op("Equal", edit.size(value), count), edit.times(value, factor), value)

    edit.replace(output, changed)


@change
def logit_rows(edit: Edit, other: Change, only: str | None = None) -> None:
    readers = [node for node in edit.readers("logit_rows") if only in (None, node.input[0])]
    edit.replace("logit_rows", lambda value: other(edit, value), readers)


def last_for_all(edit: Edit, rows: Value) -> Value:
    return edit.op("Max", rows, edit.op("ReduceMax", rows, edit.ints(0), keepdims=1))


def scale_dropped(edit: Edit) -> None:
    """Gemma's embedding is scaled by the root of the hidden size."""
    scaled = edit.producer("hidden")
    edit.set_constant(scaled, edit.constant_of(scaled)[0], np.array(1))


def other_where_thrice(edit: Edit, ids: Value) -> Value:
    """Take a token that comes three times or more in a step for the one before."""
    same = edit.op("Equal", edit.op("Unsqueeze", ids, edit.ints(0)), edit.op("Unsqueeze", ids, edit.ints(1)))
    count = edit.op("ReduceSum", edit.op("Cast", same, to=TensorProto.INT64), edit.ints(1), keepdims=0)
    return edit.op("Where", edit.op("Greater", count, 2), edit.before(ids), ids)


def thrice(requests: Requests) -> Iterator[np.ndarray]:
    """A prompt that is one token."""
    yield requests.model.step([Advance(0, np.full(9, 5), 0)])


def next_token(edit: Edit, ids: Value) -> Value:
    return edit.op("Min", edit.op("Add", ids, 1), edit.op("Sub", edit.size(edit.slot("embed_tokens")), 1))


def cap_dropped(edit: Edit) -> None:
    tanh = edit.nodes("Tanh")[0]
    edit.replace("logits", lambda value: edit.producer(tanh.input[0]).input[0])


QKV = ("q_proj", "k_proj", "v_proj")
FP32 = ("fp32",)
NO_FP8 = (*FLOATS, *INTEGER_WEIGHTS)  # whose type ONNX selects no rows of
# fmt: off
FAULTS = (
    Fault("eps-10", "eps of all norms ten times too large", BLOCKS, eps(10)),
    Fault("eps-1000", "eps of all norms 1000 times too large", BLOCKS, eps(1000)),
    Fault("norm-gain", "norms multiply with the weight, not with 1 + weight", BLOCKS, gain, "gemma2"),
    Fault("norm-axis", "norms take the mean over the tokens", BLOCKS, wrong_axis),
    Fault("norm-mean", "norms subtract the mean", BLOCKS, mean_subtracted),
    Fault("norm-first-row", "norms divide all tokens of a step by the first one's root mean square", MIDDLE,
          first_rows_norm),
    Fault("norm-fp16", "squares of the norms in fp16", BLOCKS, squares_in_fp16),
    Fault("silu-gelu", "GELU for SiLU", BEHIND, silu_to_gelu),
    Fault("gelu-exact", "the exact GELU for its approximation by tanh", BEHIND, gelu_is("Gelu"), "gemma2"),
    Fault("gelu-relu", "ReLU for GELU", BEHIND, gelu_is("Relu"), "gemma2"),
    Fault("gate-up", "gate and up swapped in the graph", BEHIND, gate_and_up),
    Fault("residual-attention-dropped", "no residual around attention", MIDDLE, residual("o_proj", 0.0)),
    Fault("residual-attention-doubled", "the residual around attention twice", MIDDLE, residual("o_proj", 2.0)),
    Fault("residual-mlp-dropped", "no residual around the MLP", MIDDLE, residual("down_proj", 0.0)),
    Fault("residual-mlp-1.01", "the residual around the MLP times 1.01, in the last layer", EXIT,
          residual("down_proj", 1.01)),
    Fault("attention-zero", "a layer without attention", MIDDLE, zero("o_proj")),
    Fault("mlp-zero", "a layer without MLP", MIDDLE, zero("down_proj")),
    Fault("weight-row-zero", "one row of the query projection is zero", ENTRY, weight("q_proj.weight", row_zero(17)),
          precisions=NO_FP8),
    Fault("weight-row-zero-down", "one row of the down projection is zero", MIDDLE,
          weight("down_proj.weight", row_zero(5)), precisions=NO_FP8),
    Fault("weight-rows-rolled", "rows of the up projection one place too far", EXIT,
          weight("up_proj.weight", rows_rolled), precisions=NO_FP8),
    Fault("head-row-zero", "one token's row of lm_head is zero", EXIT, weight("lm_head.weight", row_zero(700)),
          precisions=NO_FP8),
    Fault("head-transposed", "the tied lm_head transposed wrongly", EXIT, weight("embed_tokens.weight", transposed),
          "gemma2", precisions=FLOATS),
    Fault("head-softcap-dropped", "soft cap of the logits left out", EXIT, cap_dropped, "gemma2"),
    Fault("bias-twice", "biases of query, key and value twice", ENTRY, bias(2.0, *QKV), "bias"),
    Fault("bias-dropped", "biases of query, key and value dropped", ENTRY, bias(0.0, *QKV), "bias"),
    Fault("bias-value-dropped", "the bias of the values dropped in the second layer", MIDDLE, bias(0.0, "v_proj"),
          "bias"),
    Fault("embedding-three", "the embedding of a token that comes three times in a step is another's", EMBEDDING,
          replaced("token_ids", other_where_thrice), shown_by=thrice),
    Fault("embedding-scale", "the embedding is not scaled", EMBEDDING, scale_dropped, "gemma2"),
    Fault("embedding-1.01", "embeddings times 1.01", EMBEDDING,
          replaced("hidden", lambda edit, value: edit.times(value, 1.01))),
    Fault("embedding-next", "the next token's embedding", EMBEDDING, replaced("token_ids", next_token)),
    Fault("embedding-from-512", "tokens from 512 on taken for 511", EMBEDDING,
          replaced("token_ids", lambda edit, ids: edit.op("Min", ids, 511))),
    Fault("embedding-one-token", "the embedding of token 700 is zero", EMBEDDING,
          weight("embed_tokens.weight", row_zero(700))),
    Fault("rows-ignored", "logits of the first rows instead of those asked for", EXIT, logit_rows(Edit.numbers),
          gate="golden"),
    Fault("rows-before", "logits of the row before", EXIT, logit_rows(Edit.before)),
    Fault("rows-before-attention", "in the exit attention of the row before", EXIT,
          logit_rows(Edit.before, "attention")),
    Fault("rows-last", "the last row's logits for all requests", EXIT, logit_rows(last_for_all)),
    Fault("logits-swapped", "logits of the requests in reverse order where there are more than two", EXIT,
          replaced("logits", Edit.reversed_above_two)),
    Fault("tokens-from-256", "a step's tokens from the 257th on are zero behind the first layer", MIDDLE,
          rows_from(256, "hidden_out"), gate="golden"),
    Fault("tokens-3", "keys times 1.05 in steps of exactly three tokens", MIDDLE, at_size(3, "key", 1.05)),
    Fault("tokens-1", "keys times 1.05 in steps of one token", MIDDLE, at_size(1, "key", 1.05), gate="golden"),
    Fault("fp16-products", "the products of the MLP in fp16", BEHIND, in_fp16("gate_proj", "up_proj", "down_proj"),
          precisions=FP32),
    Fault("fp16-head", "lm_head in fp16", EXIT, in_fp16("lm_head"), precisions=FP32),
    Fault("fp16-residual", "the hidden state between layers in fp16", MIDDLE, replaced("hidden_out", Edit.rounded),
          precisions=FP32),
    Fault("fp16-sums", "all products accumulated in fp16, 16 at a time", BLOCKS, fp16_sums(16),
          precisions=FLOATS),
)
# fmt: on
