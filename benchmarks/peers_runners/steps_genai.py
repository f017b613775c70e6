"""onnxruntime-genai with weights of 4 bits in groups of 32, and its generator.

The model is the CPU form of its own model builder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from steps_side import Start, main


def make(job: dict) -> None:
    # its builder wants the id of a token that ends texts, which a shape for measuring has not
    checkpoint = Path(job["out"]) / "checkpoint"
    checkpoint.mkdir()
    for path in Path(job["checkpoint"]).resolve().iterdir():
        (checkpoint / path.name).symlink_to(path)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").write_text(json.dumps({**config, "eos_token_id": config.get("eos_token_id") or 2}))
    command = ["-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", job["out"], "-p", "int4"]
    options = ["--extra_options", "int4_block_size=32", "int4_accuracy_level=4"]
    cache = ["-e", "cpu", "-c", str(Path(job["out"]) / "cache")]
    subprocess.run([sys.executable, *command, *cache, *options], check=True)
    shutil.rmtree(checkpoint)


def opened(job: dict) -> Start:
    import onnxruntime_genai as og

    config = og.Config(job["out"])
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": job["threads"]}}}}))
    model = og.Model(config)

    def start(prompts: np.ndarray):
        parameters = og.GeneratorParams(model)
        # As long as it gets, so that an end-of-sequence token does not end it early.
        length = job["capacity"]
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=len(prompts))
        generator = og.Generator(model, parameters)
        generator.append_tokens(prompts.astype(np.int32))
        return generator.generate_next_token

    return start


if __name__ == "__main__":
    main(("onnxruntime", "onnxruntime-genai"), make, opened)
