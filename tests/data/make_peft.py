"""What PEFT itself computes with the demo's adapters: writes peft.npz next to this file.

    pip install peft==0.21.2        (in an environment with envs/requirements.txt; it brings accelerate and psutil)
    python tests/data/make_peft.py

tests/unit/runtime/test_adapters.py holds our definition of an adapter against these numbers, without PEFT.
"""

from pathlib import Path

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
RESOURCES = HERE.parents[1] / "resources"
IDS = [5, 77, 300, 12, 640, 33, 9, 101]


def base() -> torch.nn.Module:
    folder = RESOURCES / "demo-llama"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def main() -> None:
    results = {}
    with torch.no_grad():
        ids = torch.tensor([IDS])
        results["none"] = base()(ids).logits[0, -2:].numpy()
        for name in ("captain", "shakespeare"):
            model = peft.PeftModel.from_pretrained(base(), RESOURCES / "demo-adapters" / name).eval()
            results[name] = model(ids).logits[0, -2:].numpy()
            merged = model.merge_and_unload()
            layer = "model.layers.3.self_attn.q_proj.weight"
            results[f"{name} merged"] = merged.state_dict()[layer][:4].numpy()
    np.savez(HERE / "peft.npz", ids=np.array(IDS), **results)


if __name__ == "__main__":
    main()
