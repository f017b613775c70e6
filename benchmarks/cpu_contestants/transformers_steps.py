"""transformers, as it is without settings: its default attention and experts."""

from __future__ import annotations

import numpy as np
import torch
from side import Start, main
from transformers import AutoModelForCausalLM


def make(job: dict) -> None:
    """Weights are read from the checkpoint."""


def opened(job: dict) -> Start:
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.float32, local_files_only=True).eval()

    @torch.inference_mode()
    def run(tokens: np.ndarray, cache=None):
        """Return the next token of each sequence, and the cache."""
        output = model(torch.from_numpy(tokens), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1).numpy(), output.past_key_values

    def start(prompts: np.ndarray):
        state = run(prompts)

        def step() -> None:
            nonlocal state
            state = run(state[0][:, None], state[1])

        return step

    return start


if __name__ == "__main__":
    main(("torch", "transformers"), make, opened)
