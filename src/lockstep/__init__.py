"""Lockstep: checked, reproducible inference engines from Hugging Face checkpoints.

`__all__` is the public API; each name is imported on first use. docs/python.md shows it.
"""

import importlib
import os
from typing import Any

__version__ = "0.3.0"

# Telemetry of other packages is off: set before they are imported, and for every child process. A value that the user
# has set is kept. docs/network.md has the behaviour of each package.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
for _name, _value in NO_TELEMETRY.items():
    if not os.environ.get(_name):
        os.environ[_name] = _value

# {public name: (module below this package, its name there)}.
_API = {
    "Advance": ("runtime", "Advance"),
    "Assembly": ("artifacts.assembly", "Assembly"),
    "CheckError": ("errors", "CheckError"),
    "CheckpointFiles": ("runtime", "CheckpointFiles"),
    "Engine": ("runtime", "Engine"),
    "EngineSet": ("backends.engine_set", "EngineSet"),
    "GoldenTerms": ("verify.golden.terms", "GoldenTerms"),
    "InputError": ("errors", "InputError"),
    "Limits": ("targets", "Limits"),
    "Model": ("runtime", "Model"),
    "ModelDrafter": ("runtime", "ModelDrafter"),
    "ModelOptions": ("runtime", "ModelOptions"),
    "NgramDrafter": ("runtime", "NgramDrafter"),
    "Request": ("runtime", "Request"),
    "Results": ("targets", "Results"),
    "Sampling": ("runtime", "Sampling"),
    "Speculation": ("runtime", "Speculation"),
    "Target": ("targets", "Target"),
    "Tokenizer": ("runtime", "Tokenizer"),
    "Tolerances": ("tolerances", "Tolerances"),
    "Weights": ("weights", "Weights"),
    "build_engines": ("backends.builder", "build"),
    "check_golden": ("verify.golden.check", "check_engines"),
    "compare_engines": ("verify.compare", "run"),
    "convert_weights": ("weights", "convert"),
    "describe_cpu": ("backends.cpu", "describe_cpu"),
    "export_config": ("export.run", "export_config"),
    "export_graphs": ("export.run", "export"),
    "generate": ("runtime", "generate"),
    "load_config": ("config.load", "load_config"),
    "make_random_checkpoint": ("export.random_model", "make"),
    "make_reference": ("verify.golden.reference", "make_reference"),
    "open_model": ("runtime.target", "open_model"),
    "open_tokenizer": ("runtime.target", "open_tokenizer"),
    "resolve_adapters": ("weights.check_adapters", "resolve_adapters"),
    "resolve_architecture": ("checkpoint", "resolve_architecture"),
    "resolve_checkpoint": ("checkpoint", "resolve"),
    "validate_graphs": ("verify.validate", "run"),
    "verify_results": ("provenance.verify", "verify"),
}
__all__ = sorted(_API)


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    module, attribute = _API[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
