"""`grammars`: what compiling grammars costs the steps of other requests.

In: a target that was built. Out: seconds of decode steps, alone and while JSON schemas, no two alike, are compiled.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

import lockstep
from benchmarks import options
from benchmarks.measure import deliver, surroundings
from lockstep import Results, Target
from lockstep.runtime.grammar import Grammar
from lockstep.runtime.grammar.compiler import Compiler

OPTIONS = (
    options.option("--target", "A target of a finished run, with its backend.", required=True),
    options.RESULTS, options.number("--schemas", 24, "Schemas that are compiled."),
    options.number("--kilobytes", 119, "Size of a schema, in KiB."), options.WRITE,
)  # fmt: skip
STEPS = 200  # at least
QUANTILES = {"median": 0.5, "p99": 0.99, "max": 1.0}
SECONDS = 600.0  # that a schema may take, also on a busy machine
PART = {"type": "object", "properties": {"size": {"type": "integer"}, "name": {"type": "string"}}}


def main(target: str, results: Path, schemas: int, kilobytes: int, write: Path | None) -> None:
    """Steps of other requests while schemas are compiled."""
    names = Target.parse(target)
    model = lockstep.open_model(target, results)
    assembly = Results(results).assembly(names.model, names.precision)
    compiler = Compiler(assembly, model.vocab_size, model.eos_token_ids, SECONDS)
    engine = lockstep.Engine(model)
    rounds = {"warm": (1, 1), "alone": (0, 0), "beside": (schemas, kilobytes << 10)}  # the first loads the tokenizer
    seconds = {name: steps(engine, compiler, name, *sizes) for name, sizes in rounds.items()}
    record = {
        "benchmark": "grammars", "target": target, "schemas": schemas, "kilobytes": kilobytes,
        **surroundings("llguidance", "numpy"), "alone": seconds["alone"], "beside": seconds["beside"],
    }  # fmt: skip
    deliver(record, write)


def steps(engine: lockstep.Engine, compiler: Compiler, name: str, count: int, num_bytes: int) -> dict[str, float]:
    """Return quantiles of the seconds of decode steps until `count` schemas of `num_bytes` are compiled."""
    for key in range(count):
        compiler.submit(key, Grammar("json_schema", schema(f"{name}_{key}", num_bytes)))
    seconds = list[float]()
    while len(seconds) < STEPS or count:
        if not engine.has_work:
            engine.add(lockstep.Request([5, 6, 7], max_new_tokens=128))
            engine.step()
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
        for _, outcome in compiler.poll():
            if isinstance(outcome, str):
                raise lockstep.CheckError(outcome)
            count -= 1
    return {label: round(float(np.quantile(seconds, part)), 6) for label, part in QUANTILES.items()}


def schema(name: str, num_bytes: int) -> str:
    """Return a JSON schema of about this size: an object of objects."""
    count = 1 + num_bytes // (len(json.dumps(PART)) + len(name) + 10)
    return json.dumps({"type": "object", "properties": {f"{name}_{part:04}": PART for part in range(count)}})
