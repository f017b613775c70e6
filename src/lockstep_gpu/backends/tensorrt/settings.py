"""The config of TensorRT: its section `backends.tensorrt`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lockstep.config.backends import BackendSettings, not_installed
from lockstep.config.messages import Problem, Problems
from lockstep.config.section import Count, Section
from lockstep.errors import pip_install
from lockstep_gpu.compute_capability import compute_capability


class TensorRTConfig(Section):
    """How engines are built with TensorRT. Sizes come from `limits`."""

    workspace_mb: Count = Field(default=4096, description="Device memory that a tactic may use while it runs, in MiB.")
    optimization_level: Annotated[int, Field(ge=0, le=5)] = Field(
        default=4,
        description="TensorRT's builder optimization level: lower builds sooner. Level 0 ignores the timing cache.",
    )
    tactics: Literal["free", "record", "verified"] = Field(
        default="free",
        description="`record` saves the timing cache and each layer's tactic next to the engines, and reuses them; "
        "`verified` builds from such a record and fails if TensorRT chooses another tactic.",
    )
    attention: Literal["fused", "traced"] = Field(
        default="fused",
        description="`fused`: on a paged KV cache, cuDNN's attention for prompts and a kernel of our own for "
        "rows that decode, for the attention variants that these can run (needs "
        "nvidia-cudnn-frontend and cuDNN 9); "
        "`traced`: the model's own graph, in TensorRT.",
    )

    @model_validator(mode="after")
    def _across_keys(self) -> TensorRTConfig:
        if self.tactics != "free" and self.optimization_level == 0:
            text = f"expected at least 1 with tactics: {self.tactics}, since level 0 ignores the timing cache; found 0"
            raise Problems([Problem(("optimization_level",), text)])
        return self


def _missing() -> str | None:
    return not_installed("tensorrt", "tensorrt", pip_install("tensorrt"))


SETTINGS = BackendSettings(
    missing=_missing,
    cannot_build=lambda: None if compute_capability() else "needs an NVIDIA GPU, found none",
    precisions=("fp32", "fp16", "bf16"),
    lacks="weights of 8 and 4 bits are for the backend cuda",
    section=TensorRTConfig,
    takes_limits=True,
    runs_ranks=True,
    runs_adapters=("fp32", "fp16", "bf16"),
    gpus=1,
    unpinned=("tensorrt", "cuda", "cudnn", "nvmath"),
)
