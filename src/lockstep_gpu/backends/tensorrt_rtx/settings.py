"""The config of TensorRT-RTX, and whether engines can be built and run here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lockstep.config.backends import BackendSettings, not_installed
from lockstep.config.messages import Problems, repeated
from lockstep.config.section import UNIQUE, AsTuple, Section
from lockstep_gpu.backends.tensorrt_rtx.gpu import PORTABLE, why_not

# What the library has an enumerator for; 7.5 is not among the default.
ComputeCapability = Literal["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"]
_MODULE = "tensorrt_rtx_bindings"
_PACKAGE = "tensorrt-rtx"
_WHEELS = "tensorrt_rtx_cu13_bindings tensorrt_rtx_cu13_libs"


class TensorRTRTXConfig(Section):
    """How engines are built with TensorRT-RTX. Sizes come from `limits`."""

    compute_capabilities: Annotated[tuple[ComputeCapability, ...], AsTuple, Field(min_length=1)] | None = Field(
        default=None,
        json_schema_extra=UNIQUE,
        description="Compute capabilities of the GPUs that engines are built for; none: portable, which is "
        f"{PORTABLE}.",
    )

    @model_validator(mode="after")
    def _each_once(self) -> TensorRTRTXConfig:
        if problems := repeated(("compute_capabilities",), self.compute_capabilities or ()):
            raise Problems(problems)
        return self


def _missing() -> str | None:
    return not_installed(_MODULE, _PACKAGE, f"pip install {_WHEELS}")


def _cannot_run(options: Mapping[str, Any]) -> str | None:
    return why_not(options["compute_capabilities"])


SETTINGS = BackendSettings(
    precisions=("fp32", "fp16", "bf16", "w8a16", "w4a16"),
    zero_points=False,
    section=TensorRTRTXConfig,
    takes_limits=True,
    gpus=1,
    unpinned=(_MODULE, "cuda"),
    missing=_missing,
    cannot_run=_cannot_run,
)
