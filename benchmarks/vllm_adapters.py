"""vLLM with adapters, measured as `adapters-gpu` measures Lockstep.

On the same machine.

    python benchmarks/vllm_adapters.py --shape benchmarks/shapes/llama-2-7b.json --work FOLDER --out RECORD.json

It runs in the Python that has vLLM (written for 0.23), torch, NumPy and safetensors; nothing of Lockstep is imported.
In: a config.json of a Llama; weights are vLLM's dummies. The scratch folder gets the model's config and random adapters
as PEFT saves them, of all linear layers. Out: milliseconds of a decode step of 16 rows behind 512 tokens with an
adapter in each row, in one, in none, and without LoRA, each in a process of its own where the engine differs; and of
loading an adapter from its folder. The record is written after each part, so that a run that is cut short says what it
came to.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROWS, CONTEXT, FEW, MANY = 16, 512, 8, 72  # tokens of a prompt; new ones, of which the difference is timed
RANK, SMALL = 16, 8  # of the adapters in rows, and of the one that is loaded, which has 40 MB of the 7B
_NOTHING_OUTSIDE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
_CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
# Tried in this order: as vLLM starts by itself, with CUDA graphs and no compiler, with neither. The record says which.
_STARTS: tuple[dict[str, Any], ...] = (
    {},
    {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    {"enforce_eager": True},
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, required=True, help="config.json of a Llama")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder: 0.7 GB for 8 adapters of the 7B")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=190, help="behind which no part starts")
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="share of the GPU's memory")
    parser.add_argument("--part", choices=["lora", "plain"], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part:
        _part(given)
        return
    if importlib.util.find_spec("vllm") is None:
        parser.exit(2, f"vllm_adapters: expected vLLM in {sys.executable}, found none; run it in vLLM's Python\n")
    began = time.perf_counter()
    given.work.mkdir(parents=True, exist_ok=True)
    config = json.loads(given.shape.read_text(encoding="utf-8"))
    write_model(config, given.work / "model")
    record: dict[str, Any] = {
        "benchmark": "vllm-adapters",
        "rows": ROWS,
        "context": CONTEXT,
        "max_adapters": given.adapters,
        "rank": RANK,
        "adapter_bytes": max(
            write_adapter(config, _folder(given.work, number), RANK, number) for number in range(given.adapters)
        ),
        "small_bytes": write_adapter(config, given.work / "small", SMALL, given.adapters),
        "errors": {},
    }
    for part in ("lora", "plain"):
        left = given.seconds - (time.perf_counter() - began)
        if left < 20:
            record["errors"][part] = "not started: out of time"
            continue
        path = given.work / f"{part}.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, os.path.abspath(__file__), *(arguments or sys.argv[1:]), "--part", part]
        cache = (given.work / "cache").absolute()
        caches = {name: str(cache / name.lower()) for name in _CACHES}
        process = subprocess.Popen(command, env={**os.environ, **_NOTHING_OUTSIDE, **caches}, start_new_session=True)
        try:
            if code := process.wait(left):
                record["errors"][part] = f"exit code {code}"
        except subprocess.TimeoutExpired:
            record["errors"][part] = f"stopped after {left:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)  # the engine's own process too
            process.wait()
        if path.is_file():
            record[part] = json.loads(path.read_text(encoding="utf-8"))
        record["seconds"] = round(time.perf_counter() - began, 1)
        _write(given.out, record)
    print(json.dumps(record, indent=2))


def write_model(config: Mapping[str, Any], folder: Path) -> None:
    """Write a folder that vLLM takes for a model, without weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", config)


def write_adapter(config: Mapping[str, Any], folder: Path, rank: int, seed: int) -> int:
    """Write an adapter of all linear layers in fp16, as PEFT saves it.

    Each layer has the same random numbers. Returns its bytes.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = (size * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    modules = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    random = np.random.default_rng(seed)
    numbers = lambda *shape: (random.standard_normal(shape, np.float32) * np.float32(0.01)).astype(np.float16)
    pairs = {name: (numbers(rank, deep), numbers(out, rank)) for name, (deep, out) in modules.items()}
    tensors = {
        f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight": array
        for layer in range(config["num_hidden_layers"])
        for name, pair in pairs.items()
        for side, array in zip("AB", pair)
    }
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path)
    targets = [name.rpartition(".")[2] for name in modules]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": targets}
    _write(folder / "adapter_config.json", settings)
    return path.stat().st_size


def _folder(work: Path, number: int) -> Path:
    return work / f"a{number}"


def _part(given: argparse.Namespace) -> None:
    """One engine, in this process: with LoRA, or without."""
    lora = given.part == "lora"
    settings: dict[str, Any] = {
        "model": str((given.work / "model").absolute()),
        "dtype": "float16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
        "max_num_seqs": ROWS,
        "gpu_memory_utilization": given.gpu_memory,
        "seed": 0,
        "disable_log_stats": True,
    }
    if lora:
        settings |= {"enable_lora": True, "max_loras": given.adapters, "max_lora_rank": RANK}
    found: dict[str, Any] = {"errors": []}
    path = given.work / f"{given.part}.json"
    began = time.perf_counter()
    from vllm import LLM, SamplingParams, __version__
    from vllm.lora.request import LoRARequest

    found |= {"version": __version__, "import_seconds": round(time.perf_counter() - began, 1)}
    llm: Any = None
    for number, more in enumerate(_STARTS):
        try:
            llm = LLM(**settings, **more)
            found |= {"start": more, "ready_seconds": round(time.perf_counter() - began, 1)}
            break
        except Exception:
            found["errors"].append(traceback.format_exc()[-2000:])
            _write(path, found)
            if number + 1 == len(_STARTS):
                raise
    adapters = [LoRARequest(f"a{n}", n + 1, str(_folder(given.work, n).absolute())) for n in range(given.adapters)]
    nobody: list[Any] = [None] * ROWS
    ways = {"no row": nobody}
    if lora:
        ways |= {
            "each row": [adapters[row % len(adapters)] for row in range(ROWS)],
            "one row": [adapters[0], *nobody[1:]],
        }
    random = np.random.default_rng(0)

    def seconds(rows: Sequence[Any], count: int) -> float:
        prompts = [
            {"prompt_token_ids": random.integers(3, 1000, CONTEXT).tolist()} for _ in rows
        ]  # new ones each time: nothing is reused
        greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        loras = list(rows) if lora else None
        started = time.perf_counter()
        made = llm.generate(prompts, greedy, use_tqdm=False, lora_request=loras)
        taken = time.perf_counter() - started
        assert sum(len(each.outputs[0].token_ids) for each in made) == count * len(rows)
        return taken

    steps: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(given.rounds + 1):  # in turn; the first, which loads and warms up, does not count
        for way, rows in ways.items():
            few, many = seconds(rows, FEW), seconds(rows, MANY)
            if number:
                steps[way].append(1e3 * (many - few) / (MANY - FEW))
        if number:
            found["decode_step"] = {"milliseconds": {way: _spread(values) for way, values in steps.items()}}
            if lora:
                found["decode_step"]["times_as_long"] = {
                    way: _spread([a / b for a, b in zip(values, steps["no row"])])
                    for way, values in steps.items()
                    if way != "no row"
                }
            _write(path, found)
    if lora:
        taken = []
        for number in range(given.rounds + 1):  # a new number each time: else it is there
            request = LoRARequest(f"small{number}", given.adapters + 1 + number, str((given.work / "small").absolute()))
            started = time.perf_counter()
            assert llm.llm_engine.add_lora(request)
            taken.append(1e3 * (time.perf_counter() - started))
        found["load"] = {"milliseconds": _spread(taken[1:])}
        _write(path, found)
    llm.llm_engine.engine_core.shutdown()


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": round(min(values), 3), "median": round(statistics.median(values), 3), "max": round(max(values), 3)}


def _write(path: Path, document: Mapping[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    main()
