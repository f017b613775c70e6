"""A model repository for NVIDIA's Triton Inference Server, whose models ask `lockstep serve --unix`."""
