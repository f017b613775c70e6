"""transformers for the GPU benchmark, in a separate Python.

JSON comes in on stdin, and goes out on the last line of stdout.

A Llama on the weights of a manifest: eager with a static cache, the same compiled, one prompt; and the logits of one
prompt and its greedy continuation in fp32 and fp16, into `reference-<layers>.npz`. Needs torch and transformers only.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache


def model_of(request, layers, dtype):
    """Return the first `layers` layers of the weights, on the device."""
    manifest = json.loads(Path(request["weights"]).read_text())
    data = np.memmap(Path(request["weights"]).with_name(manifest["files"][0]["path"]), np.uint8, "r")
    tensors = manifest["tensors"]
    config = LlamaConfig(**{**request["config"], "num_hidden_layers": layers})
    with torch.device(request["device"]):
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied weight once
            entry = tensors[name]
            raw = (
                np.array(data[entry["offset"] : entry["offset"] + entry["length"]])
                .view(np.float16)
                .reshape(entry["shape"])
            )
            parameter.copy_(torch.from_numpy(raw))
    return model


def speeds(request, model, step, compiled):
    times_by_batch = {}
    for batch in request["batches"]:
        cache = StaticCache(config=model.config, max_cache_len=1024)
        ids = (
            torch.arange(request["context"], device=request["device"]).repeat(batch, 1)
            % request["config"]["vocab_size"]
        )
        with torch.no_grad():
            out = model(
                ids,
                past_key_values=cache,
                cache_position=torch.arange(request["context"], device=request["device"]),
                use_cache=True,
                logits_to_keep=1,
            )
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            times = []
            for number in range(30 + request["steps"]):
                began = time.perf_counter()
                position = torch.tensor([request["context"] + number], device=request["device"])
                if compiled:
                    torch.compiler.cudagraph_mark_step_begin()
                token = step(token, position, cache).clone()
                token.cpu()
                times.append(time.perf_counter() - began)
        median = statistics.median(times[30:])
        times_by_batch[str(batch)] = {
            "milliseconds": round(median * 1e3, 3),
            "tokens_per_second": round(batch / median, 1),
        }
    return times_by_batch


def reference(request, layers):
    """Return logits of the prompt's last token and of each greedy token after it.

    In fp32, then along the same tokens in fp16.
    """
    depth = request["config"]["num_hidden_layers"] if layers == "all" else layers
    prompt = np.arange(7, 7 + request["prompt"]) * 37 % request["config"]["vocab_size"]
    saved = {"prompt": prompt}
    tokens = []
    for dtype, name in ((torch.float32, "fp32"), (torch.float16, "fp16")):
        model = model_of(request, depth, dtype)
        with torch.no_grad():
            while len(tokens) < request["tokens"]:  # greedily, in fp32
                ids = torch.tensor([[*prompt, *tokens]], device=request["device"])
                tokens.append(int(model(ids, use_cache=False).logits[0, -1].argmax()))
            ids = torch.tensor([[*prompt, *tokens[:-1]]], device=request["device"])
            saved[name] = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu().numpy()
        del model
        torch.cuda.empty_cache()
    np.savez(Path(request["work"]) / f"reference-{layers}.npz", tokens=np.array(tokens), **saved)


def main():
    request = json.load(sys.stdin)
    if request.get("probe"):  # can it run at all?
        torch.zeros(1, device=request["device"])
        print(json.dumps(None))
        return
    for layers in request["layers"]:
        reference(request, layers)
    if "batches" not in request:  # logits alone
        print(json.dumps(None))
        return
    model = model_of(request, request["config"]["num_hidden_layers"], torch.float16)

    def eager(token, position, cache):
        return (
            model(token, past_key_values=cache, cache_position=position, use_cache=True)
            .logits[:, -1]
            .argmax(-1, keepdim=True)
        )

    record = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "eager": speeds(request, model, eager, False),
    }
    record["compiled"] = speeds(request, model, torch.compile(eager, mode="reduce-overhead"), True)
    ids = torch.arange(request["prefill"], device=request["device"])[None] % request["config"]["vocab_size"]
    times = []
    with torch.no_grad():
        for number in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            model(ids, use_cache=False, logits_to_keep=1).logits.argmax(-1).cpu()
            if number:
                times.append(time.perf_counter() - began)
    record["prefill_milliseconds"] = round(statistics.median(times) * 1e3, 2)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
