"""The TensorRT backend: graphs in, engines without weights out, run on a GPU.

Only `compat` imports the library.
"""
