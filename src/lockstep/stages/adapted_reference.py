"""Tokens and logits of transformers with each adapter."""

from __future__ import annotations

from typing import Any

from lockstep.stages.reference import make_reference
from lockstep.stages.stage import EXPORT, TORCH, Config, Job, Names, Stage
from lockstep.targets import Target, is_quantized


class AdaptedReference(Stage):
    output = "{model}/adapted_reference/{layers}.json"
    reads = {"checkpoint": "{model}/checkpoint.json", "adapters": "{model}/adapters.json"}
    code = (*EXPORT, "verify/*", "verify/golden")
    packages = TORCH
    help = "Tokens and logits of transformers with each adapter."
    is_check = only_adapters = True

    def needed(self, config: Config, target: Target) -> bool:
        return super().needed(config, target) and not is_quantized(target.precision)

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        return reference_options(config, names["model"])

    def run(self, job: Job) -> None:
        make_reference(job)


def reference_options(config: Config, model: str) -> dict[str, Any]:
    prompts = {name: [prompt.text for prompt in each] for name, each in config.adapter_prompts(model).items()}
    settings = config.models[model]
    dtype = {"kv_cache_dtype": settings.kv_cache_dtype} if settings.kv_cache_dtype else {}
    return {"golden": {"max_new_tokens": settings.golden.max_new_tokens, "adapted": prompts, **dtype}}
