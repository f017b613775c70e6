"""Run requests in this process: prompts in one batch, and one step by step.

    python examples/in_process.py                                       # the demo, after `make demo`
    python examples/in_process.py my-llama/fp16/all/onnxruntime "Once upon a time" "The sea"

In: a target of results/ in this folder, and prompts. Out: a line for each completion. Needs NumPy and the library of
the target's backend, no torch. docs/python.md explains each call.
"""

from __future__ import annotations

import sys

import lockstep
from lockstep import Engine, Request, Sampling


def main(target: str = "demo-llama/fp16/all/onnxruntime", *prompts: str) -> None:
    model = lockstep.open_model(target)
    tokenizer = lockstep.open_tokenizer(target)
    engine = Engine(model)
    texts = list(prompts or ("San Francisco is a", "Light"))

    # All prompts in one batch, greedily: the same tokens as each alone.
    for completion in engine.generate(texts, tokenizer, Sampling(temperature=0), max_new_tokens=16):
        print("greedy: ", completion.choices[0].text)

    # Two drawn answers of each. The seed makes them the same at each run, whatever else is in the batch.
    for completion in engine.generate(texts, tokenizer, Sampling(0.8, top_p=0.95, seed=7), n=2, max_new_tokens=16):
        for choice in completion.choices:
            print("sampled:", choice.text)

    # Step by step: other requests may be added, or this one aborted, between any two steps.
    ids = tokenizer.encode(texts[0])
    engine.add(Request(ids, max_new_tokens=16))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token.token for token in engine.step()]
    print("stepped:", tokenizer.decode(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
