"""The TensorRT-RTX backend: graphs in, engines without weights out.

Engines are built on any x86-64 machine and run on an NVIDIA RTX GPU. Only `library` imports the package.
"""
