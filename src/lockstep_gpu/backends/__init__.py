"""The backends whose engines run on NVIDIA GPUs, by the runtime of `lockstep_gpu`."""
