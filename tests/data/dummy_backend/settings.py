"""The config's section `backends.dummy`."""

from __future__ import annotations

from pydantic import Field

from lockstep.config.backends import BackendSettings
from lockstep.config.section import Section


class DummyConfig(Section):
    """How engines are built for the reference implementation of ONNX."""

    checked: bool = Field(default=True, description="Whether `onnx.checker` looks at a graph first.")


SETTINGS = BackendSettings(precisions=("fp32",), lacks="it is here to be small", section=DummyConfig)
