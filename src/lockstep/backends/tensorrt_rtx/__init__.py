"""The TensorRT-RTX backend: graphs in, engines without weights out, built on any x86-64 machine, run on an NVIDIA RTX
GPU. Only `library` imports the package."""
