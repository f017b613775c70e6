"""The model builder of onnxruntime-genai, fp32 for the CPU, and its generator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from side import Start, main


def export(job: dict) -> None:
    command = [
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        job["checkpoint"],
        "-o",
        job["out"],
        "-p",
        "fp32",
        "-e",
        "cpu",
    ]
    subprocess.run([sys.executable, *command, "-c", str(Path(job["result"]).parent / "cache")], check=True)


def decode(job: dict) -> Start:
    import onnxruntime_genai as og

    config = og.Config(job["out"])
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": job["threads"]}}}}))
    model = og.Model(config)
    total = job["context"] + job["steps"] + 1

    def start(prompt: np.ndarray):
        parameters = og.GeneratorParams(model)
        # As long as it gets, so that an end-of-sequence token does not end it early.
        parameters.set_search_options(max_length=total, min_length=total, do_sample=False, batch_size=1)
        generator = og.Generator(model, parameters)
        generator.append_tokens(prompt.astype(np.int32))
        logits = np.array(generator.get_logits()).reshape(-1)

        def advance(steps: int) -> list[int]:
            # the first takes its token from the prompt's logits, without a step of the model
            for _ in range(steps + 1):
                generator.generate_next_token()
            return [int(token) for token in generator.get_sequence(0)[len(prompt) :]]

        return logits, advance

    return start


if __name__ == "__main__":
    main(("onnx", "onnx-ir", "onnxruntime", "onnxruntime-genai", "torch", "transformers"), export, decode)
