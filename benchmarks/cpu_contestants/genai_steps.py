"""onnxruntime-genai and its generator; the model is the CPU form of its model builder.

int4: groups of 32, int8 activations, the head too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from side import Start, main


def make(job: dict) -> None:
    # its builder wants the id of a token that ends texts and the class, which a shape or a GGUF file has not
    checkpoint = Path(job["out"]) / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir()
    for path in Path(job["checkpoint"]).resolve().iterdir():
        (checkpoint / path.name).symlink_to(path)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"eos_token_id": config.get("eos_token_id") or 2, "architectures": ["LlamaForCausalLM"]}
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").write_text(json.dumps(config))
    command = [
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        str(checkpoint),
        "-o",
        job["out"],
        "-p",
        job["precision"],
    ]
    options = ["--extra_options", "int4_block_size=32", "int4_accuracy_level=4"] if job["precision"] == "int4" else []
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
        length = job["capacity"]  # as long as it gets, so that an end-of-sequence token does not end it early
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=len(prompts))
        generator = og.Generator(model, parameters)
        generator.append_tokens(prompts.astype(np.int32))
        return generator.generate_next_token

    return start


if __name__ == "__main__":
    main(("onnxruntime", "onnxruntime-genai"), make, opened)
