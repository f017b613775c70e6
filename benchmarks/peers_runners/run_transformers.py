"""transformers itself, in torch's eager mode with the attention it chooses.

The ONNX models are compared with it. It exports nothing.
"""

from __future__ import annotations

import numpy as np
from side import Start, greedy, main


def decode(job: dict) -> Start:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.float32, local_files_only=True).eval()

    def start(prompt: np.ndarray):
        cache = None

        @torch.inference_mode()
        def run(tokens: np.ndarray) -> np.ndarray:
            nonlocal cache
            result = model(torch.from_numpy(tokens[None]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = result.past_key_values
            return result.logits[0, -1].numpy()

        logits = run(prompt)
        return logits, greedy(logits, lambda token: run(np.array([token])))

    return start


if __name__ == "__main__":
    main(("torch", "transformers"), decode=decode)
