"""What the config knows of the `cuda` backend."""

from __future__ import annotations

from lockstep.config.backends import BackendSettings
from lockstep_gpu.backends.cuda.gpu import MODEL_SETTINGS, PRECISIONS, why_not
from lockstep_gpu.compute_capability import total_memory

SETTINGS = BackendSettings(
    precisions=PRECISIONS,
    lacks="its kernels multiply no integers with integers",
    takes_limits=True,
    runs_ranks=True,
    runs_adapters=("fp16", "bf16"),
    zero_points=False,
    mxfp4=True,
    model_settings=MODEL_SETTINGS,
    gpus=1,
    unpinned=("cuda", "cudnn", "nvmath"),
    cannot_run=why_not,
    device_memory=total_memory,
)
