"""The load that the options of `lockstep load` ask for.

options: those of the command line by name. Times are seconds, lengths are tokens, `rate` is in requests per second,
`cancel` is a share of the requests.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.load.measure import LoadSpec
    from lockstep.load.records import Prompt

_WORKLOADS = ("dataset", "token-norm-dist", "token-from-histogram", "trace")


def load_spec(workload: str | None, options: SimpleNamespace) -> LoadSpec:
    """Return the load that the options ask for.

    Raises InputError for options that contradict each other, and for prompts that cannot be read.
    """
    from lockstep.load.arrivals import SPELLINGS
    from lockstep.load.figures import goals
    from lockstep.load.measure import LoadSpec

    endpoint = options.endpoint or "completions"
    if options.protocol == "grpc":
        if options.endpoint in ("completions", "chat"):
            raise InputError(f"load: expected --endpoint triton over gRPC, found {endpoint}; leave it or -i out")
        endpoint = "grpc"
    prompts, about = _prompts(workload, options)
    prompts, about = _as_ids(prompts, options.tokenizer_dir, options.max_input_len, about)
    arrivals = SPELLINGS.get(options.arrivals, options.arrivals)
    extra = _extra(options.body)
    if about["kind"] in ("token-norm-dist", "histogram") and "ignore_eos" not in extra:
        extra["ignore_eos"] = True  # answers have the drawn lengths
    if options.exact and not options.functional:
        raise InputError("load: expected --exact with --functional, found it alone")
    if about["kind"] == "trace" and options.rate != (math.inf,):
        raise InputError("load: expected --trace or --rate, found both: a trace says when its requests are due")
    names = ("seed", "concurrency", "cancel", "cancel_within", "timeout", "warmup")
    rest: dict[str, Any] = {name: getattr(options, name) for name in names}
    rest |= {"extra": extra, "goodput": goals(options.goodput)}
    return LoadSpec(prompts, about, endpoint, options.rate, arrivals, **rest)


def _prompts(workload: str | None, options: SimpleNamespace) -> tuple[list[Prompt], dict[str, Any]]:
    from lockstep.artifacts.files import sha256_file
    from lockstep.load import workload as made

    kind = workload and {"token-from-histogram": "histogram"}.get(name := workload.replace("_", "-"), name)
    if workload and workload.replace("_", "-") not in _WORKLOADS:
        raise InputError(f"load: expected a workload of {', '.join(_WORKLOADS)}, found {workload!r}")
    if options.input_mean is not None or options.output_mean is not None:
        if options.token_norm_dist or options.input_mean is None or options.output_mean is None:
            raise InputError("load: expected --token-norm-dist, or both --input-mean and --output-mean")
        keys = ("input_mean", "input_stdev", "output_mean", "output_stdev")
        options.token_norm_dist = ",".join(f"{getattr(options, key):g}" for key in keys)
    chosen = [key for key in ("dataset", "token_norm_dist", "histogram", "trace") if getattr(options, key)]
    if len(chosen) != 1 or (kind and kind != chosen[0].replace("_", "-")):
        found = " and ".join(f"--{key.replace('_', '-')}" for key in chosen) or "none"
        expected = f"--{kind}" if kind else "one of --dataset, --token-norm-dist, --histogram, --trace"
        raise InputError(f"load: expected {expected}, found {found}")
    number = options.requests
    seed = options.seed
    source = getattr(options, chosen[0])
    if chosen == ["token_norm_dist"]:
        try:
            sizes = [float(part) for part in source.split(",")]
        except ValueError:
            sizes = []
        return made.normal(number or 100, sizes, seed), {"kind": "token-norm-dist", "tokens": sizes}
    if chosen == ["histogram"]:
        prompts = made.histogram(number or 100, source, options.histogram_key, seed)
    elif chosen == ["dataset"]:
        prompts = made.dataset(source, number, options.max_tokens)
    else:
        prompts = made.trace(source, number, options.max_tokens, seed)
    return prompts, {"kind": chosen[0], "sha256": sha256_file(source), "key": options.histogram_key}


def _as_ids(
    prompts: list[Prompt], folder: Path | None, longest: int | None, about: dict[str, Any]
) -> tuple[list[Prompt], dict[str, Any]]:
    """Encode texts as token ids, and leave out prompts longer than `longest`.

    folder: of the tokenizer; None leaves texts as they are. Raises InputError where no prompt is left.
    """
    if folder is not None:
        from lockstep.runtime.tokenizer import Tokenizer

        path = folder / "tokenizer.json" if folder.is_dir() else folder
        tokenizer = Tokenizer(path)
        prompts = [
            replace(each, content=tokenizer.encode(each.content).tolist()) if isinstance(each.content, str) else each
            for each in prompts
        ]
    if longest is not None:
        prompts = [each for each in prompts if not isinstance(each.content, list) or len(each.content) <= longest]
        if not prompts:
            raise InputError(f"--max-input-len: expected prompts of at most {longest} tokens, found none; raise it")
    return prompts, {**about, "as_ids": folder is not None, "max_input_len": longest}


def _extra(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise InputError(f"--body: expected a JSON object, found {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"--body: expected a JSON object, found {text!r}")
    if taken := sorted({"stream", "stream_options", "prompt", "messages", "n"} & set(value)):
        raise InputError(f"--body: expected fields other than {', '.join(taken)}, which this command sets itself")
    return value
