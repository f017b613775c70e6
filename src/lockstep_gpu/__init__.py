"""The GPU runtime, on which the backends `cuda` and `tensorrt` run their engines.

`program` says what a backend's engines must offer. `executor` runs steps: a captured graph where rows decode, a pass
where prompts come, on one GPU or several (`ranks`). `attention` and `kernels` have what runs between engines.
`libraries` finds cuBLAS, cuDNN and NVRTC; `cuda` is the driver.
"""
