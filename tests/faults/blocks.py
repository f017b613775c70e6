"""Faults of the blocks: norms, activations, residuals, weights, precision.

And of the embedding and of row selection.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import NodeProto

from faults.edit import Edit, Value
from faults.fault import BLOCKS, Fault
from faults.neighbours import swapped_above_two

_BEHIND = ("middle", "exit")  # what stands behind an attention: output projection and MLP


def norms(edit: Edit) -> list[tuple[NodeProto, NodeProto, NodeProto]]:
    """(Pow, ReduceMean, Add of eps) of each root mean square norm."""
    return [
        (edit.producer(mean.input[0]), mean, edit.reader(mean.output[0], "Add")) for mean in edit.nodes("ReduceMean")
    ]


def residual(edit: Edit, projection: str) -> NodeProto:
    """Return the sum that takes in the product of a projection."""
    return edit.reader(edit.product(projection).output[0], "Add")


def _eps(factor: float) -> Callable[[Edit], None]:
    def plant(edit: Edit) -> None:
        for _, _, add in norms(edit):
            place, eps = edit.constant_of(add)
            edit.set_constant(add, place, eps * factor)

    return plant


def _gain(edit: Edit) -> None:
    """Gemma multiplies with 1 + weight, in fp32."""
    for weight in [value.name for value in edit.graph.input if value.name.endswith("norm.weight")]:
        cast = next((node.output[0] for node in edit.readers(weight) if node.op_type == "Cast"), weight)
        edit.replace(edit.reader(cast, "Add").output[0], lambda value, cast=cast: cast)


def _wrong_axis(edit: Edit) -> None:
    for _, mean, _ in norms(edit):
        edit.set_constant(mean, 1, np.array([0]))


def _mean_subtracted(edit: Edit) -> None:
    for power, _, add in norms(edit):
        value = power.input[0]
        root = edit.reader(edit.reader(add.output[0], "Sqrt").output[0], "Reciprocal").output[0]
        readers = [power, edit.reader(root, "Mul")]
        edit.replace(value, lambda x: edit.op("Sub", x, edit.op("ReduceMean", x, edit.ints(-1))), readers)


def _first_rows_norm(edit: Edit) -> None:
    for _, mean, _ in norms(edit):
        edit.replace(mean.output[0], lambda value: edit.op("Gather", value, edit.ints(0), axis=0))


def _squares_in_fp16(edit: Edit) -> None:
    for power, _, _ in norms(edit):
        edit.replace(power.output[0], edit.rounded)


def _silu_to_gelu(edit: Edit) -> None:
    gate = edit.product("gate_proj").output[0]
    edit.replace(edit.reader(gate, "Mul").output[0], lambda value: edit.op("Gelu", gate))


def _gelu_exact(edit: Edit) -> None:
    node = edit.nodes("Gelu")[0]
    edit.replace(node.output[0], lambda value: edit.op("Gelu", node.input[0]))


def _gelu_to_relu(edit: Edit) -> None:
    node = edit.nodes("Gelu")[0]
    edit.replace(node.output[0], lambda value: edit.op("Relu", node.input[0]))


def _gate_and_up(edit: Edit) -> None:
    gate, up = edit.product("gate_proj"), edit.product("up_proj")
    gate.input[1], up.input[1] = up.input[1], gate.input[1]


def _residual(projection: str, factor: float) -> Callable[[Edit], None]:
    """Take what a sum adds the projection to times `factor`."""

    def plant(edit: Edit) -> None:
        add, product = residual(edit, projection), edit.product(projection).output[0]
        edit.replace(
            next(name for name in add.input if name != product), lambda value: edit.times(value, factor), [add]
        )

    return plant


def _product(projection: str, change: Callable[[Edit, Value], Value]) -> Callable[[Edit], None]:
    return lambda edit: edit.replace(edit.product(projection).output[0], lambda value: change(edit, value))


def _weight(slot: str, change: Callable[[Edit, Value], Value]) -> Callable[[Edit], None]:
    def plant(edit: Edit) -> None:
        name = edit.slot(slot)
        edit.replace(name, lambda value: change(edit, value))

    return plant


def _row_zero(row: int) -> Callable[[Edit, Value], Value]:
    def change(edit: Edit, weight: Value) -> Value:
        return edit.op(
            "Where", edit.column(edit.op("Equal", edit.numbers(weight), edit.const(row))), edit.like(weight, 0), weight
        )

    return change


def _rows_rolled(edit: Edit, weight: Value) -> Value:
    """Row i is row i-1: as if the first row had been read twice and the last dropped."""
    return edit.op(
        "Gather", weight, edit.op("Max", edit.op("Sub", edit.numbers(weight), edit.const(1)), edit.const(0)), axis=0
    )


def _transposed(edit: Edit, weight: Value) -> Value:
    """Read the bytes of [rows, columns] as [columns, rows], and transpose them then."""
    shape = edit.op("Shape", weight)
    other = edit.op("Gather", shape, edit.ints(1, 0), axis=0)
    return edit.op("Transpose", edit.op("Reshape", weight, other), perm=[1, 0])


def _in_fp16(*projections: str) -> Callable[[Edit], None]:
    def plant(edit: Edit) -> None:
        for projection in projections:
            node = edit.product(projection)
            for name in list(node.input[:2]):
                edit.replace(name, edit.rounded, [node])
            edit.replace(node.output[0], edit.rounded)

    return plant


def _fp16_sums(block: int) -> Callable[[Edit], None]:
    """Accumulate each product in pieces of `block`, in fp16.

    Each piece and each sum is rounded to fp16.
    """

    def plant(edit: Edit) -> None:
        for node in list(edit.nodes("Gemm")):
            left, weight, width = node.input[0], node.input[1], _width(edit, node.input[1])

            def summed(value: Value) -> Value:
                total = None
                for low in range(0, width, block):
                    cut = lambda name: edit.op(
                        "Slice", name, edit.ints(low), edit.ints(min(low + block, width)), edit.ints(1)
                    )
                    piece = edit.rounded(edit.op("Gemm", cut(left), cut(weight), transB=1))
                    total = piece if total is None else edit.rounded(edit.op("Add", total, piece))
                return total

            edit.replace(node.output[0], summed)

    return plant


def _width(edit: Edit, weight: Value) -> int:
    value = next(value for value in edit.graph.input if value.name == weight)
    return value.type.tensor_type.shape.dim[1].dim_value


def _bias(slots: tuple[str, ...], factor: float) -> Callable[[Edit], None]:
    def plant(edit: Edit) -> None:
        for slot in slots:
            edit.replace(edit.slot(f"{slot}.bias"), lambda value: edit.times(value, factor))

    return plant


def _at_size(count: int, output: Value, factor: float) -> Callable[[Edit], None]:
    """Take an output times `factor` in steps of exactly `count` rows."""

    def plant(edit: Edit) -> None:
        def change(value: Value) -> Value:
            return edit.op(
                "Where", edit.op("Equal", edit.size(value), edit.const(count)), edit.times(value, factor), value
            )

        edit.replace(output, change)

    return plant


def _rows_from(first: int, output: Value) -> Callable[[Edit], None]:
    return lambda edit: edit.replace(
        output,
        lambda value: edit.rows_where(value, edit.op("GreaterOrEqual", edit.numbers(value), edit.const(first)), 0.0),
    )


def _logit_rows(change: Callable[[Edit, Value], Value], only: str | None = None) -> Callable[[Edit], None]:
    def plant(edit: Edit) -> None:
        readers = [node for node in edit.readers("logit_rows") if only in (None, node.input[0])]
        edit.replace("logit_rows", lambda value: change(edit, value), readers)

    return plant


def _row_before(edit: Edit, rows: Value) -> Value:
    return edit.op("Max", edit.op("Sub", rows, edit.const(1)), edit.const(0))


def _ids(change: Callable[[Edit, Value], Value]) -> Callable[[Edit], None]:
    return lambda edit: edit.replace("token_ids", lambda value: change(edit, value))


def _scale_dropped(edit: Edit) -> None:
    """Gemma's embedding is scaled by the root of the hidden size."""
    scaled = edit.producer("hidden")
    edit.set_constant(scaled, edit.constant_of(scaled)[0], np.array(1))


def _cap_dropped(edit: Edit) -> None:
    tanh = edit.nodes("Tanh")[0]
    edit.replace("logits", lambda value: edit.producer(tanh.input[0]).input[0])


def _zero(edit: Edit, value: Value) -> Value:
    return edit.times(value, 0.0)


FAULTS = (
    Fault("eps-10", "eps of all norms ten times too large", graphs=BLOCKS, edit=_eps(10)),
    Fault("eps-1000", "eps of all norms 1000 times too large", graphs=BLOCKS, edit=_eps(1000)),
    Fault("norm-gain", "norms multiply with the weight, not with 1 + weight", "gemma2", BLOCKS, _gain),
    Fault("norm-axis", "norms take the mean over the tokens", graphs=BLOCKS, edit=_wrong_axis),
    Fault("norm-mean", "norms subtract the mean", graphs=BLOCKS, edit=_mean_subtracted),
    Fault(
        "norm-first-row",
        "norms divide all tokens of a step by the first one's root mean square",
        graphs=("middle",),
        edit=_first_rows_norm,
    ),
    Fault("norm-fp16", "squares of the norms in fp16", graphs=BLOCKS, edit=_squares_in_fp16),
    Fault("silu-gelu", "GELU for SiLU", graphs=_BEHIND, edit=_silu_to_gelu),
    Fault("gelu-exact", "the exact GELU for its approximation by tanh", "gemma2", _BEHIND, _gelu_exact),
    Fault("gelu-relu", "ReLU for GELU", "gemma2", _BEHIND, _gelu_to_relu),
    Fault("gate-up", "gate and up swapped in the graph", graphs=_BEHIND, edit=_gate_and_up),
    Fault(
        "residual-attention-dropped", "no residual around attention", graphs=("middle",), edit=_residual("o_proj", 0.0)
    ),
    Fault(
        "residual-attention-doubled",
        "the residual around attention twice",
        graphs=("middle",),
        edit=_residual("o_proj", 2.0),
    ),
    Fault("residual-mlp-dropped", "no residual around the MLP", graphs=("middle",), edit=_residual("down_proj", 0.0)),
    Fault(
        "residual-mlp-1.01",
        "the residual around the MLP times 1.01, in the last layer",
        graphs=("exit",),
        edit=_residual("down_proj", 1.01),
    ),
    Fault("attention-zero", "a layer without attention", graphs=("middle",), edit=_product("o_proj", _zero)),
    Fault("mlp-zero", "a layer without MLP", graphs=("middle",), edit=_product("down_proj", _zero)),
    Fault(
        "weight-row-zero",
        "one row of the query projection is zero",
        graphs=("entry",),
        edit=_weight("q_proj.weight", _row_zero(17)),
    ),
    Fault(
        "weight-row-zero-down",
        "one row of the down projection is zero",
        graphs=("middle",),
        edit=_weight("down_proj.weight", _row_zero(5)),
    ),
    Fault(
        "weight-rows-rolled",
        "rows of the up projection one place too far",
        graphs=("exit",),
        edit=_weight("up_proj.weight", _rows_rolled),
    ),
    Fault(
        "head-row-zero",
        "one token's row of lm_head is zero",
        graphs=("exit",),
        edit=_weight("lm_head.weight", _row_zero(700)),
    ),
    Fault(
        "head-transposed",
        "the tied lm_head transposed wrongly",
        "gemma2",
        ("exit",),
        _weight("embed_tokens.weight", _transposed),
    ),
    Fault("head-softcap-dropped", "soft cap of the logits left out", "gemma2", ("exit",), _cap_dropped),
    Fault(
        "bias-twice",
        "biases of query, key and value twice",
        "bias",
        ("entry",),
        _bias(("q_proj", "k_proj", "v_proj"), 2.0),
    ),
    Fault(
        "bias-dropped",
        "biases of query, key and value dropped",
        "bias",
        ("entry",),
        _bias(("q_proj", "k_proj", "v_proj"), 0.0),
    ),
    Fault(
        "bias-value-dropped",
        "the bias of the values dropped in the second layer",
        "bias",
        ("middle",),
        _bias(("v_proj",), 0.0),
    ),
    Fault("embedding-scale", "the embedding is not scaled", "gemma2", ("embedding",), _scale_dropped),
    Fault(
        "embedding-1.01",
        "embeddings times 1.01",
        graphs=("embedding",),
        edit=lambda edit: edit.replace("hidden", lambda value: edit.times(value, 1.01)),
    ),
    Fault(
        "embedding-next",
        "the next token's embedding",
        graphs=("embedding",),
        edit=_ids(
            lambda edit, ids: edit.op(
                "Min",
                edit.op("Add", ids, edit.const(1)),
                edit.op("Sub", edit.size(edit.slot("embed_tokens")), edit.const(1)),
            )
        ),
    ),
    Fault(
        "embedding-from-512",
        "tokens from 512 on taken for 511",
        graphs=("embedding",),
        edit=_ids(lambda edit, ids: edit.op("Min", ids, edit.const(511))),
    ),
    Fault(
        "embedding-one-token",
        "the embedding of token 700 is zero",
        graphs=("embedding",),
        edit=_weight("embed_tokens.weight", _row_zero(700)),
    ),
    Fault(
        "rows-ignored",
        "logits of the first rows instead of those asked for",
        graphs=("exit",),
        edit=_logit_rows(lambda edit, rows: edit.numbers(rows)),
    ),
    Fault("rows-before", "logits of the row before", graphs=("exit",), edit=_logit_rows(_row_before)),
    Fault(
        "rows-before-attention",
        "in the exit attention of the row before",
        graphs=("exit",),
        edit=_logit_rows(_row_before, "attention"),
    ),
    Fault(
        "rows-last",
        "the last row's logits for all requests",
        graphs=("exit",),
        edit=_logit_rows(lambda edit, rows: edit.op("Max", rows, edit.op("ReduceMax", rows, edit.ints(0), keepdims=1))),
    ),
    Fault(
        "logits-swapped",
        "logits of the requests in reverse order where there are more than two",
        graphs=("exit",),
        edit=lambda edit: edit.replace("logits", lambda value: swapped_above_two(edit, value)),
    ),
    Fault(
        "tokens-from-256",
        "a step's tokens from the 257th on are zero behind the first layer",
        graphs=("middle",),
        edit=_rows_from(256, "hidden_out"),
    ),
    Fault(
        "tokens-3",
        "keys times 1.05 in steps of exactly three tokens",
        graphs=("middle",),
        edit=_at_size(3, "key", 1.05),
    ),
    Fault("tokens-1", "keys times 1.05 in steps of one token", graphs=("middle",), edit=_at_size(1, "key", 1.05)),
    Fault(
        "fp16-products",
        "the products of the MLP in fp16",
        graphs=_BEHIND,
        edit=_in_fp16("gate_proj", "up_proj", "down_proj"),
        precisions=("fp32",),
    ),
    Fault("fp16-head", "lm_head in fp16", graphs=("exit",), edit=_in_fp16("lm_head"), precisions=("fp32",)),
    Fault(
        "fp16-residual",
        "the hidden state between layers in fp16",
        graphs=("middle",),
        edit=lambda edit: edit.replace("hidden_out", edit.rounded),
        precisions=("fp32",),
    ),
    Fault("fp16-sums", "all products accumulated in fp16, 16 at a time", graphs=BLOCKS, edit=_fp16_sums(16)),
)
