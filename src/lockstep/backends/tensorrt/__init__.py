"""The TensorRT backend: graphs in, engines without weights out, run on an NVIDIA GPU. Only `compat` imports the
library."""
