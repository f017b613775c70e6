"""The demo's engine, stepped until its requests end."""

import numpy as np
import pipeline

CHUNK = 64


def open_model(demo, precision="fp32", layers="all", **options):
    sizes = {"max_batch_size": 4, "max_seq_len": 256, "chunk_size": CHUNK}
    return pipeline.open_model(demo, "demo-llama", precision, layers, **sizes | options)


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(3, 500, length)


def with_logits(engine, *requests, arrivals=None):
    """Tokens and logits by request; request i is added before step `arrivals[i]`."""
    waiting = list(enumerate(requests))
    results = {}
    count = 0
    while waiting or engine.has_work:
        while waiting and (arrivals is None or arrivals[waiting[0][0]] <= count):
            engine.add(waiting.pop(0)[1])
        for output in engine.step():
            tokens, logits = results.setdefault(output.request, ([], []))
            tokens.append(output.token)
            logits.append(output.logits)
        count += 1
    engine.scheduler.check()
    return results


def argmax(logits):
    return int(logits.argmax())
