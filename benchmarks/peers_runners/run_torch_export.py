"""A plain `torch.onnx.export` of the model of transformers with its weights.

The cache goes in and out as flat tensors.
"""

from __future__ import annotations

from pathlib import Path

from past_session import decode
from side import main


def export(job: dict) -> None:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    class WithPast(torch.nn.Module):
        def __init__(self, model: torch.nn.Module):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask, past):
            cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
            result = self.model(
                input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True
            )
            return result.logits, [
                tensor for layer in result.past_key_values.layers for tensor in (layer.keys, layer.values)
            ]

    model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.float32, local_files_only=True)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = [f"{layer}.{what}" for layer in range(config.num_hidden_layers) for what in ("key", "value")]
    new, before = 2, 3  # example lengths; both are dynamic
    example = (
        torch.ones(1, new, dtype=torch.int64),
        torch.ones(1, before + new, dtype=torch.int64),
        [torch.zeros(1, config.num_key_value_heads, before, head_dim) for _ in names],
    )
    dynamic = torch.export.Dim.DYNAMIC
    torch.onnx.export(
        WithPast(model).eval(), example, Path(job["out"]) / "model.onnx", dynamo=True, external_data=True,
        input_names=["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)],
        output_names=["logits", *(f"present.{name}" for name in names)],
        dynamic_shapes=({1: dynamic}, {1: dynamic}, [{2: dynamic}] * len(names)),
    )  # fmt: skip


if __name__ == "__main__":
    main(("onnx", "onnxruntime", "onnxscript", "torch", "transformers"), export, decode)
