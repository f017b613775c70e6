"""Fine-tune a model with LoRA: pairs of prompt and answer in, an adapter as PEFT saves it and a config out.

    python examples/finetune.py                         # the demo model, examples/finetune.jsonl, into tuned/
    lockstep run tuned/config.yaml                      # builds and checks the base with room for the adapter
    lockstep serve demo-tuned/fp32                      # one base, any number of adapters in one batch
    curl localhost:8000/v1/completions -d '{"model": "demo-tuned:mine", "prompt": "The ferry"}'

Needs torch, transformers and safetensors, which `make setup` installs, and no PEFT: with PEFT, `model.save_pretrained`
writes the same two files. Only the linear layers of attention are adapted here; docs/adapters.md says what else can be.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
RANK, ALPHA = 8, 16
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


class Lora(torch.nn.Module):
    """A LoRA beside a linear layer: adds `scale * B A x` to what the layer gives. B begins at zero."""

    def __init__(self, layer: torch.nn.Linear):
        super().__init__()
        self.a = torch.nn.Parameter(torch.empty(RANK, layer.in_features))
        self.b = torch.nn.Parameter(torch.zeros(layer.out_features, RANK))
        torch.nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        layer.register_forward_hook(lambda _, inputs, output: output + inputs[0] @ self.a.T @ self.b.T * (ALPHA / RANK))


def train(base: Path, pairs: list[tuple[str, str]], steps: int) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors under PEFT's names, trained on the answers of the pairs; the base is not changed."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).requires_grad_(False)
    parts = {name: Lora(layer) for name, layer in model.named_modules() if name.endswith(MODULES)}
    ids, labels = [], []
    for prompt, answer in pairs:
        begin = tokenizer(prompt).input_ids
        end = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        ids.append(torch.tensor(begin + end))
        labels.append(torch.tensor([-100] * len(begin) + end))  # the loss is of the answers alone
    batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    expected = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW([weight for part in parts.values() for weight in part.parameters()], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        loss = model(input_ids=batch, labels=expected).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    matrices = {
        f"{name}.lora_{side}": weight for name, part in parts.items() for side, weight in zip("AB", (part.a, part.b))
    }
    return {f"base_model.model.{name}.weight": weight.detach().contiguous() for name, weight in matrices.items()}


def save(folder: Path, base: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors as PEFT's `save_pretrained` does."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "base_model_name_or_path": str(base),
        "bias": "none",
        "lora_alpha": ALPHA,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": list(MODULES),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def config(base: Path, adapter: Path, pairs: list[tuple[str, str]]) -> dict:
    """Return a config for the base with the adapter, whose golden prompts are those that it was trained on."""
    prompts = [{"text": prompt} for prompt, _ in pairs]
    model = {
        "source": str(base),
        "precisions": ["fp32"],
        "adapters": {"mine": {"source": str(adapter)}},
        "lora_target_modules": list(MODULES),
        "golden": {"max_new_tokens": 16, "prompts": prompts},
    }
    limits = {"max_batch_size": 4, "max_num_tokens": 512, "max_seq_len": 256, "max_input_len": 128}
    return {"models": {"demo-tuned": model}, "limits": limits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--base", type=Path, default=REPOSITORY / "resources" / "demo-llama", help="a checkpoint folder"
    )
    parser.add_argument("--data", type=Path, default=REPOSITORY / "examples" / "finetune.jsonl", help="lines of JSON")
    parser.add_argument("--out", type=Path, default=Path("tuned"), help="a folder for the adapter and config.yaml")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    lines = arguments.data.read_text(encoding="utf-8").splitlines()
    pairs = [(pair["prompt"], pair["answer"]) for pair in map(json.loads, lines)]
    base, adapter = arguments.base.resolve(), arguments.out.resolve() / "adapter"
    save(adapter, base, train(base, pairs, arguments.steps))
    text = yaml.safe_dump(config(base, adapter, pairs), sort_keys=False, allow_unicode=True)
    (arguments.out / "config.yaml").write_text(text, encoding="utf-8")
    print(
        f"{adapter} and {arguments.out / 'config.yaml'} are written; next: lockstep run {arguments.out / 'config.yaml'}"
    )


if __name__ == "__main__":
    main()
