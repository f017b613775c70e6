"""Tokens and logits of transformers with each adapter."""

from __future__ import annotations

from typing import Any

from lockstep.stages.reference import make_reference
from lockstep.stages.stage import Config, Job, Names, Stage, artefacts
from lockstep.targets import Target, is_quantized


class AdaptedReference(Stage):
    output = "{model}/adapted_reference/{layers}.json"
    reads = artefacts("checkpoint", "adapters")
    help = "Tokens and logits of transformers with each adapter."
    is_check = only_adapters = True

    def needed(self, config: Config, target: Target) -> bool:
        return super().needed(config, target) and self.only_quantized == is_quantized(target.precision)

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        model = config.models[names["model"]]
        adapters = config.adapter_prompts(names["model"])
        prompts = {name: [prompt.text for prompt in each] for name, each in adapters.items()}
        dtype = {"kv_cache_dtype": model.kv_cache_dtype} if model.kv_cache_dtype else {}
        return {"golden": {"max_new_tokens": model.golden.max_new_tokens, "adapted": prompts, **dtype}}

    def run(self, job: Job) -> None:
        make_reference(job)
