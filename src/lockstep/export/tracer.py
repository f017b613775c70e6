"""Trace the batchful part and the embedding of a transformers causal LM, without its weights.

In: a model's config.json as a mapping and a dtype. Out: an ONNX graph (onnx_ir) of `hidden [num_tokens, hidden_size]`,
`position_ids [num_tokens]` -> `logits [num_tokens, vocab_size]` in which each token mixer is one node of the domain
"lockstep" and each weight is an initializer without a value, named as in the checkpoint.

Method: parameters are fake tensors (shape and dtype only); attention is replaced through transformers'
`AttentionInterface`, and recurrent functions in the modules that call them, so no model needs custom code;
`aten.linear` becomes `Gemm(transB=1)`, which reads weights in checkpoint layout.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import onnx_ir as ir
import onnxscript
import torch
from onnx_ir import convenience
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.onnx._internal.exporter import _core as onnx_exporter
from torch.onnx._internal.exporter._capture_strategies import TorchExportNonStrictStrategy
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.artifacts.dtypes import PRECISION_NAMES
from lockstep.errors import InputError
from lockstep.export.attention_hook import HOOK, unpacked
from lockstep.export.bfloat16 import widen_unsupported
from lockstep.export.decoder_layers import layer_list, only_layers
from lockstep.export.embedding import at_entry, is_changed
from lockstep.export.float64_constants import float64_constants
from lockstep.export.language import build_config, refused_in_one_line, root_cause
from lockstep.export.markers import DOMAIN
from lockstep.export.quiet import quiet
from lockstep.export.refusals import known_reason
from lockstep.export.rope import freeze_ropes
from lockstep.export.state_hook import FUNCTIONS, numbered, replaced
from lockstep.export.torch_operators import OPSET, torch_operators
from lockstep.onnx_tools.values import shape_of
from lockstep.processes import paused_collector

DTYPES: dict[str, torch.dtype] = {precision: getattr(torch, name) for precision, name in PRECISION_NAMES.items()}
_WEIGHT_PREFIX = "model_under_trace."
# Numbers in a computed buffer (1 GB): parameters stay without values, rotary frequencies and position tables do not.
_MAX_TABLE = 1 << 28
_TRACE_TOKENS = 7  # any number that no dimension of a model equals by chance


@dataclass(frozen=True)
class Trace:
    """The result of one trace.

    graph: the ONNX model; weights: names of its weight initializers (as in the checkpoint, ties resolved);
    layer_prefix: what precedes the layer's number in weight names ("model.layers"). Numbers count the traced layers.
    mixing: which of the traced layers have a token mixer.
    embedding: `token_ids [num_tokens]` -> `hidden [num_tokens, hidden_size]`, and the names of its weights.
    """

    graph: ir.Model
    weights: frozenset[str]
    layer_prefix: str
    embedding: ir.Model
    embedding_weights: frozenset[str]
    mixing: frozenset[int]


# --- models without weights ---


def meta_model(config: Mapping[str, Any], precision: str) -> PreTrainedModel:
    """Return the model of a config.json mapping, on the meta device.

    Parameters have no values; computed buffers (rotary frequencies ...) have theirs.

    precision: "fp32", "fp16" or "bf16". Raises InputError for a model that is no causal LM of transformers.
    """
    settings = build_config(config)
    dtype = DTYPES[precision]
    # Each row gathers its expert's weights. The usual code loops over the experts that some token chose, which a trace
    # without values cannot know.
    settings._experts_implementation = "batched_mm"
    with quiet():
        with refused_in_one_line(settings.model_type), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
        _compute_buffers(model, settings.model_type)
    _keep_float32(model, dtype)
    freeze_ropes(model)
    model.config._attn_implementation = HOOK
    return model.eval()


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make the weights float32 that `from_pretrained` loads so in `dtype`, such as the biases of a router's scores."""
    patterns = [pattern.replace("*", ".*") for pattern in sorted(model._get_dtype_plan(dtype))]
    if not patterns:
        return
    stays_float32 = re.compile("|".join(patterns))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and stays_float32.search(name):
            tensor.data = tensor.data.float()


def _compute_buffers(model: PreTrainedModel, model_type: str) -> None:
    """Give values to the buffers that no checkpoint has, by their module or (Falcon-H1) by one that contains it."""
    computed: dict[torch.nn.Module, list[str]] = {}
    for module in model.modules():
        buffers: dict[str, Any] = module._buffers
        for name in sorted(module._non_persistent_buffers_set):
            buffer: Any = buffers.get(name)
            if not getattr(buffer, "is_meta", False):
                continue
            numbers = buffer.numel()
            if numbers > _MAX_TABLE:
                raise InputError(
                    f"config.json: expected sizes of a model, found ones that make {name} a table of {numbers} numbers;"
                    " correct head_dim or max_position_embeddings"
                )
            buffers[name] = torch.full(buffer.shape, math.nan).to(buffer.dtype)  # NaN marks values to compute
            computed.setdefault(module, []).append(name)

    def unset_buffers(module: torch.nn.Module) -> list[str]:
        values: dict[str, Any] = module._buffers
        names = computed.get(module, ())
        return [name for name in names if values[name].is_floating_point() and values[name].isnan().any()]

    cannot = f"model type {model_type!r} cannot be split: "
    refusal = f"{cannot}transformers gives no value for its buffers"
    # A generator: which modules contain an unset buffer is asked only after the modules' own turn.
    containing = (module for module in model.modules() if any(map(unset_buffers, module.modules())))
    for module in (*computed, *containing):
        try:
            with float64_constants():
                model._init_weights(module)
        except AttributeError as error:  # a composite class expects its language model's settings in its own config
            reason = known_reason(model)
            if reason is None:
                raise InputError(f"{refusal}: {error}") from error
            raise InputError(cannot + reason) from error
    for module in computed:
        if unset_buffers(module):
            raise InputError(f"{refusal} {unset_buffers(module)}")


def _to_fake(model: PreTrainedModel, mode: FakeTensorMode) -> None:
    """Replace meta parameters and buffers by fake CPU ones; tied ones stay one object."""
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in fakes:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        if store is module._parameters:
                            fake = torch.nn.Parameter(fake, requires_grad=False)
                        fakes[id(tensor)] = fake
                store[name] = fakes[id(tensor)]


class _Packed(torch.nn.Module):
    """The whole causal LM and its embedding module (which may scale), as traced.

    hidden [num_tokens, hidden_size] and position_ids [num_tokens] -> logits [num_tokens, vocab_size]; token_ids
    [num_tokens] -> embedded [num_tokens, hidden_size].
    """

    def __init__(self, model: PreTrainedModel, first_layer: torch.nn.Module):
        super().__init__()
        self.model_under_trace = model
        # In a tuple, so that it is no submodule: its weights would get a second name.
        self._first_layer = (first_layer,) if is_changed(model, first_layer) else ()

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"position_ids": position_ids[None], "use_cache": False}
        if self._first_layer:
            with at_entry(self._first_layer[0], hidden[None]) as entered:
                logits = self.model_under_trace(input_ids=token_ids[None], **options).logits[0]
            return logits, entered[0][0]
        logits = self.model_under_trace(inputs_embeds=hidden[None], **options).logits[0]
        return logits, self.model_under_trace.get_input_embeddings()(token_ids)


def trace(meta: PreTrainedModel, indices: Sequence[int]) -> Trace:
    """Trace the batchful part of the layers `indices` of a `meta_model`.

    Raises InputError with the reason when the model cannot be traced or does not use transformers' attention interface.
    """
    with only_layers(meta, indices):
        model = copy.deepcopy(meta)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    prefix, layers = layer_list(model)
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    _to_fake(model, mode)
    with mode:
        table = cast(torch.Tensor, model.get_input_embeddings().weight)
        hidden = torch.zeros(_TRACE_TOKENS, table.shape[1], dtype=model.dtype)
        inputs = {
            "hidden": hidden,
            "position_ids": torch.arange(_TRACE_TOKENS),
            "token_ids": torch.arange(_TRACE_TOKENS),
        }
        with unpacked():  # it runs the model once, to see how it embeds
            packed = _Packed(model, layers[0])
    # Markers carry the numbers of the layers in the whole model, not in this cut one.
    with replaced(model, FUNCTIONS), numbered(layers, indices):
        traced_model = _export(packed, inputs, ("logits", "embedded"))
    graph = _part(traced_model, ("hidden", "position_ids"), "logits")
    embedding = _part(traced_model, ("token_ids",), "embedded")
    embedding.graph.outputs[0].name = "hidden"
    state = set(model.state_dict())
    weights = _name_weights(graph, state, ties)
    calls = [node.attributes["layer"].value for node in graph.graph if node.domain == DOMAIN]
    mixing = [index for index in indices if index in calls]
    is_ordered = list(dict.fromkeys(calls)) == mixing
    reason_not_to_split = known_reason(model)
    # Layers without a mixer are fine (Nemotron-H), unless the model is known to hide one.
    if not is_ordered or indices[0] not in mixing or (mixing != list(indices) and reason_not_to_split):
        reason = reason_not_to_split or _reason_by_calls(calls, indices)
        raise InputError(f"model type {model.config.model_type!r} cannot be split: {reason}")
    return Trace(graph, weights, prefix, embedding, _name_weights(embedding, state, ties), frozenset(mixing))


def _reason_by_calls(calls: Sequence[int], indices: Sequence[int]) -> str:
    """Return why a model cannot be split that calls the attention interface for the layers `calls`, in this order."""
    fault = "computes attention in its own code"
    if calls:
        fault = f"calls it for layers {calls}"
    return (
        f"it {fault}; expected one attention for each layer, the first at least, through transformers' attention "
        f"interface, in the order of the layers ({list(indices)})"
    )


def _part(model: ir.Model, inputs: Sequence[str], output: str) -> ir.Model:
    graph = convenience.extract(model.graph, list(inputs), [output])
    return ir.Model(graph, ir_version=model.ir_version)


def _export(module: _Packed, inputs: dict[str, torch.Tensor], outputs: Sequence[str]) -> ir.Model:
    dim = torch.export.Dim("num_tokens", min=1, max=1 << 20)
    try:
        with quiet(), torch.no_grad(), paused_collector(), unpacked():
            # The first of the ways that torch.onnx.export(dynamo=True) tries; the others take long, and their errors
            # would hide the reason of this one.
            capture = TorchExportNonStrictStrategy()
            dynamic_shapes = {name: {0: dim} for name in inputs}
            captured = capture(module.eval(), tuple(inputs.values()), {}, dynamic_shapes)
            if captured.exported_program is None:
                raise captured.exception or RuntimeError("torch.export gave no program")
            # torch.onnx.export calls this too, but builds a registry of all operators each time: 0.4 s.
            # Unoptimised: fake weights have no values yet, which folding would read.
            program = onnx_exporter.export(
                captured.exported_program,
                (),
                {},
                registry=torch_operators(),
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                input_names=list(inputs),
                output_names=list(outputs),
            )
            model = program.model
            for value in (*model.graph.inputs, *model.graph.outputs):
                value.shape = ir.Shape(["num_tokens", *shape_of(value)[1:]])
            for value in model.graph.initializers.values():
                if isinstance(getattr(value.const_value, "raw", None), FakeTensor):
                    value.const_value = None  # a fake weight has no value; folding must not read it
            onnxscript.optimizer.optimize_ir(model)
            widen_unsupported(model)
    except Exception as error:  # any error of a model's code under trace is the reason why it is rejected
        model_under_trace = module.model_under_trace
        reason = known_reason(model_under_trace)
        if reason is None and isinstance(error, InputError):
            reason = str(error)
        elif reason is None:
            reason = f"tracing it fails: {root_cause(error)}"
        raise InputError(f"model type {model_under_trace.config.model_type!r} cannot be split: {reason}") from error
    return model


def _name_weights(model: ir.Model, state: set[str], ties: Mapping[str, str]) -> frozenset[str]:
    """Give weights, which unlike computed buffers are in the state dict, their checkpoint names; return these."""
    weights = set()
    initializers = model.graph.initializers
    for value in list(initializers.values()):
        assert value.name is not None  # it is registered by name
        name = value.name.removeprefix(_WEIGHT_PREFIX)
        if value.name.startswith(_WEIGHT_PREFIX) and name in state:
            value.name = name
            weights.add(name)
    # A tied weight has the name under which the checkpoint stores it, unless both are read.
    for tied, source in sorted(ties.items()):
        if tied in weights and source not in weights:
            initializers[tied].name = source
            weights = weights - {tied} | {source}
    unknown = [value.name for value in initializers.values() if value.const_value is None and value.name not in weights]
    if unknown:
        raise InputError(f"cannot be split: {unknown[:3]} depend on weights but are not in the checkpoint")
    return frozenset(weights)
