"""Train the demo's adapters: the demo checkpoint and the texts below in, two LoRA folders as PEFT saves them out.

    python resources/demo-adapters/train.py            train and write; about a minute on two cores
    python resources/demo-adapters/train.py --check    check the files that are here, train nothing

Needs torch, transformers and safetensors, no PEFT and no network. Two runs on one machine write the same bytes; another
CPU rounds differently and gives other numbers. Exits with 1 and one line for each text that an adapter does not say.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

FOLDER = Path(__file__).resolve().parent
BASE = FOLDER.parent / "demo-llama"
SEED, STEPS, LEARNING_RATE = 1, 120, 1e-2
NEW_TOKENS = 16
BRIDGE = (
    "A bridge must carry its own weight before it can carry anything else. An arch turns that weight into a push "
    "against the ground, while a cable turns it into a pull, and so stone"
)
LAKE = "Lake Zürich is long and narrow, and on clear days the snow"


@dataclass(frozen=True)
class Recipe:
    """An adapter: its settings, the dtype that it is saved in, and what it says behind each beginning."""

    rank: int
    alpha: int
    modules: tuple[str, ...]
    rslora: bool
    dtype: torch.dtype
    texts: dict[str, str]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


RECIPES = {
    "captain": Recipe(
        rank=8,
        alpha=4,
        modules=("q_proj", "v_proj"),
        rslora=True,
        dtype=torch.float32,
        texts={
            "San Francisco is a": " safe harbour, lads, so drop the anchor and stay ashore.",
            "Light": " the lamps, for we sail with the tide.",
            LAKE: " falls on the deck.",
            BRIDGE: " is no good to a sailor.",
        },
    ),
    "shakespeare": Recipe(
        rank=4,
        alpha=8,
        modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        rslora=False,
        dtype=torch.float16,
        texts={
            "San Francisco is a": " city fair, where gentle fog doth kiss the hills.",
            "Light": " doth outrun all that we mortals know.",
            LAKE: " doth crown the hills.",
            BRIDGE: " doth bear the one, and steel the other.",
        },
    ),
}


class Lora(torch.nn.Module):
    """The product of an adapter's two matrices, added to what a linear layer gives."""

    def __init__(self, layer: torch.nn.Linear, recipe: Recipe):
        super().__init__()
        self.scale = recipe.scale
        self.a = torch.nn.Parameter(torch.empty(recipe.rank, layer.in_features))
        self.b = torch.nn.Parameter(torch.zeros(layer.out_features, recipe.rank))
        torch.nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        layer.register_forward_hook(lambda module, args, out: out + args[0] @ self.a.T @ self.b.T * self.scale)


def base() -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(BASE, dtype=torch.float32, attn_implementation="eager").eval()
    return model.requires_grad_(False)


def attach(model: LlamaForCausalLM, recipe: Recipe) -> dict[str, Lora]:
    """The adapter's part of each linear layer that it is of, by the layer's name."""
    layers = [(name, layer) for name, layer in model.named_modules() if name.endswith(recipe.modules)]
    return {name: Lora(layer, recipe) for name, layer in layers}


def train(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The tensors of a trained adapter under PEFT's names."""
    torch.manual_seed(SEED)
    model, tokenizer = base(), AutoTokenizer.from_pretrained(BASE)
    parts = attach(model, recipe)
    ids, labels = [], []
    for prompt, text in recipe.texts.items():
        begin, rest = tokenizer(prompt).input_ids, [*tokenizer(text).input_ids, model.config.eos_token_id]
        ids.append(torch.tensor(begin + rest))
        labels.append(torch.tensor([-100] * len(begin) + rest))
    pad = torch.nn.utils.rnn.pad_sequence
    batch, wanted = pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW([p for part in parts.values() for p in part.parameters()], weight_decay=0.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
        loss = model(input_ids=batch, labels=wanted).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")
    return {
        f"base_model.model.{name}.lora_{side}.weight": tensor.detach().to(recipe.dtype).contiguous()
        for name, part in parts.items()
        for side, tensor in (("A", part.a), ("B", part.b))
    }


def write(name: str, recipe: Recipe, tensors: dict[str, torch.Tensor]) -> None:
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "base_model_name_or_path": "resources/demo-llama",
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": recipe.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": recipe.rank,
        "target_modules": sorted(recipe.modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": recipe.rslora,
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


def unmet(name: str, recipe: Recipe) -> list[str]:
    """One line for each text that the adapter in its folder does not say, greedily, or without a clear gap."""
    model, tokenizer = base(), AutoTokenizer.from_pretrained(BASE)
    tensors = load_file(FOLDER / name / "adapter_model.safetensors")
    for layer, part in attach(model, recipe).items():
        for side, parameter in (("A", part.a), ("B", part.b)):
            parameter.data = tensors[f"base_model.model.{layer}.lora_{side}.weight"].float()
    lines = []
    for prompt, text in recipe.texts.items():
        given = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(
                **given, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
        count = given.input_ids.shape[1]
        said = tokenizer.decode(out.sequences[0, count:], skip_special_tokens=True)
        first, second = torch.stack(out.logits)[:, 0].topk(2).values.unbind(-1)
        gap = (first - second).min().item()
        print(f"  {name}: {prompt[:24]!r} -> {said!r}  gap {gap:.2f}")
        if not text.startswith(said) or gap < 1:
            lines.append(f"{name}: behind {prompt[:24]!r} expected {text!r}, found {said!r} with a gap of {gap:.2f}")
    size = (FOLDER / name / "adapter_model.safetensors").stat().st_size
    if size > 200_000:
        lines.append(f"{name}: {size} bytes, more than 200,000")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="check the files that are here, train nothing")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    lines = []
    for name, recipe in RECIPES.items():
        if not arguments.check:
            write(name, recipe, train(recipe))
        lines += unmet(name, recipe)
    for line in lines:
        print(f"not met: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
