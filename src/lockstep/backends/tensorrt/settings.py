"""The config of TensorRT: its section `backends.tensorrt`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from lockstep.config.backends import BackendSettings, not_installed
from lockstep.config.messages import Problem, Problems, repeated
from lockstep.config.section import UNIQUE, AsTuple, Count, PathText, Section

# TensorRT's names, in lower case
TacticSource = Literal["cublas", "cublas_lt", "cudnn", "edge_mask_convolutions", "jit_convolutions"]


class TensorRTConfig(Section):
    """How engines are built with TensorRT. Sizes come from `limits`."""

    python: Annotated[PathText, StringConstraints(min_length=1)] | None = Field(
        default=None,
        description="The Python interpreter that builds and runs the engines, where it is not this one: a "
        "path, or a command. TensorRT 8.6.0 needs "
        "CPython 3.10, Snakemake 3.11. It needs tensorrt, cuda-python, numpy, onnx, onnxruntime, polygraphy "
        "and tokenizers, and the "
        "library NVRTC; with `attention: fused` also nvidia-cudnn-frontend and the library cuDNN 9.",
    )
    workspace_mb: Count = Field(default=4096, description="Device memory that a tactic may use while it runs, in MiB.")
    optimization_level: Annotated[int, Field(ge=0, le=5)] = Field(
        default=4,
        description="TensorRT's builder optimization level: lower builds sooner. Level 0 ignores the timing "
        "cache. TensorRT 8.6 accumulates fp16 products in fp16 "
        "where it does not fuse them, which at levels 4 and 5 is seldom; the build says so. What is built as "
        "one region (`one_region`) is at level 3 at most.",
    )
    one_region: bool = Field(
        default=True,
        description="With TensorRT 8.6, have the fp16 graphs of blocks compiled as one fused region each, "
        "which builds them sooner than the search at levels 4 and 5, and fuses all products, "
        "which are then accumulated in fp32 but for a few that the build names. A graph that TensorRT cannot "
        "build so, and every one with `false`, is built at `optimization_level`. Ignored by other versions.",
    )
    tactic_sources: Annotated[tuple[TacticSource, ...], AsTuple] | None = Field(
        default=None,
        json_schema_extra=UNIQUE,
        description="Which libraries tactics may come from; none: TensorRT's own choice. Without cuBLAS and cuDNN: "
        "`[edge_mask_convolutions, jit_convolutions]`. TensorRT 11 knows these two only.",
    )
    tactics: Literal["free", "record", "verified"] = Field(
        default="free",
        description="`record` keeps the timing cache and what was chosen for each layer beside the engines, "
        "and goes on from them; `verified` builds from "
        "such a record and fails where anything else is chosen; with TensorRT 8.6, which chooses the kernels "
        "of fused regions anew in each build, that is often.",
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
        problems = repeated(("tactic_sources",), self.tactic_sources or ())
        if self.tactics != "free" and self.optimization_level == 0:
            text = f"expected at least 1 with tactics: {self.tactics}, since level 0 ignores the timing cache; found 0"
            problems.append(Problem(("optimization_level",), text))
        if problems:
            raise Problems(problems)
        return self


def _missing() -> str | None:
    install = "pip install tensorrt cuda-python, or name another interpreter in backends.tensorrt.python"
    return not_installed("tensorrt", "tensorrt", install)


SETTINGS = BackendSettings(
    missing=_missing,
    module="tensorrt",
    precisions=("fp32", "fp16", "bf16"),
    lacks="weights of 8 and 4 bits are for the backend cuda",
    section=TensorRTConfig,
    takes_limits=True,
    runs_ranks=True,
    runs_adapters=("fp32", "fp16", "bf16"),
    gpus=1,
    # 8.6 on an H200: keys behind a RoPE angle of 250 rad are off by 6e-5 of their magnitude.
    fp32_part=1.0,
    unpinned=("tensorrt", "cuda", "cudnn"),
    built_on=("gpu", "backends/onnxruntime"),
)
