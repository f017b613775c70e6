"""A model repository for NVIDIA's Triton Inference Server, whose five models ask `lockstep serve --unix`."""
