"""Triton's and KServe's protocols, over HTTP and gRPC, and repositories for Triton: a plug-in of `lockstep serve`."""
