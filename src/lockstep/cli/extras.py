"""The extra of pyproject.toml that installs each Python package beyond `dependencies`."""

from __future__ import annotations

from lockstep.errors import InputError, pip_install

# {import name: extra}.
EXTRAS = {
    "OpenSSL": "publish",
    "cryptography": "publish",
    "cuda.bindings": "cuda",
    "cudnn": "cuda",
    "cyclonedx": "publish",
    "gguf": "workflow",
    "google.protobuf": "grpc",
    "grpc": "grpc",
    "httptools": "serve",
    "huggingface_hub": "workflow",
    "jinja2": "serve",
    "llguidance": "grammar",
    "ml_dtypes": "workflow",
    "model_signing": "publish",
    "msgspec": "serve",
    "nvmath": "cuda",
    "onnx_graphsurgeon": "workflow",
    "onnx_ir": "workflow",
    "onnxscript": "workflow",
    "opentelemetry": "otel",
    "openvino": "openvino",
    "polygraphy": "workflow",
    "prometheus_client": "serve",
    "pydantic": "workflow",
    "pygal": "workflow",
    "rich": "workflow",
    "safetensors": "workflow",
    "securesystemslib": "publish",
    "snakemake": "workflow",
    "snakemake_executor_plugin_slurm": "slurm",
    "starlette": "serve",
    "tensorrt": "tensorrt",
    "torch": "workflow",
    "tqdm": "workflow",
    "transformers": "workflow",
    "uvicorn": "serve",
    "uvloop": "serve",
    "yaml": "workflow",
}


def missing_package(command: str | None, error: ModuleNotFoundError) -> InputError | None:
    """Return the error of a command whose package is not installed, with its extra; None for our own modules."""
    module = error.name or ""
    if module.partition(".")[0] in ("", "lockstep", "lockstep_gpu", "lockstep_serve"):
        return None
    # The error names a part of a package ("torch.fx"), or the folder that several share ("google" of google.protobuf).
    packages = [name for name in EXTRAS if f"{module}.".startswith(f"{name}.") or f"{name}.".startswith(f"{module}.")]
    remedies = [pip_install(EXTRAS[name]) for name in packages] or ["install it"]
    return InputError(
        f"{command or 'lockstep'}: needs the Python package {module!r}, which is not installed here; {remedies[0]}"
    )
