"""The TensorRT backend: graphs in, engines without weights out. Only `compat` imports the library."""
