"""`ranks`: a model over several GPUs, at each number of ranks, compared with aims.

Builds, readiness, decoding, prompts, sums and logits are measured.

In: shapes, which get random weights, and a scratch folder. Out: a record, and its page with numbers and
aims. Each shape at each number of ranks is measured in a child process, which writes its part into the scratch folder:
a run that was cut short resumes after the last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lockstep
from benchmarks import cold, options
from benchmarks.batches import sums
from benchmarks.gpu import (
    BATCHES,
    LIMITS,
    build_seconds,
    check,
    decode,
    described,
    in_words,
    llama,
    prefill,
    probe,
    random_weights,
    ready,
    ready_seconds,
    record_path,
    references,
)
from benchmarks.markdown import paragraph, table
from benchmarks.measure import by_size, read_json, write_json
from benchmarks.shapes import config_of
from lockstep import Assembly, InputError

RANKS = {"llama-2-7b": (1, 2, 4), "llama-3-70b": (4,)}
# Too large for a disk with all their layers apart, or for the GPU of transformers at full depth in fp32.
ALIKE = {"llama-3-70b"}
CHECK_LAYERS: dict[str, tuple[int | str, ...]] = {"llama-2-7b": (2, "all"), "llama-3-70b": (2, 16)}
ONE_GPU = "LOCKSTEP_RANKS_ON_ONE_GPU"
OPTIONS = (
    replace(options.SHAPES, help="A Llama shape that comes with the benchmark, or a config.json."),
    options.number(
        "--ranks", (), "How many ranks; may be given several times.  [default: 1, 2 and 4, of the 70B shape 4; what "
        "the GPUs allow]", maximum=16, name="degrees", many=True,
    ),
    *options.ON_A_GPU,
)  # fmt: skip


def main(
    shapes: Sequence[str], degrees: Sequence[int], backend: str, work: Path,
    build_options: dict[str, Any], rounds: int, write: Path | None,
) -> None:  # fmt: skip
    """Measure several GPUs.

    Builds, readiness, decoding, prompts and logits, compared with transformers and with aims. A run that was cut short
    is resumed with the same folder.
    """
    counts = {path: degrees or RANKS.get(path.stem, (1, 2, 4)) for path in map(config_of, shapes)}
    configs = {path: llama(path) for path in counts}
    cold.ask("benchmarks.gpu:device", backend=backend)
    gpus = cold.ask("benchmarks.ranks:count_gpus", ranks=max(map(max, counts.values())))
    smallest = min(map(min, counts.values()))
    if gpus < smallest:
        raise InputError(
            f"ranks: expected {smallest} GPUs or more, for the smallest number of ranks, found {gpus}; make more "
            "visible (CUDA_VISIBLE_DEVICES), or ask for fewer with --ranks"
        )
    cases: dict[str, dict[str, Any]] = {}
    pairs = list[tuple[Path, int]]()
    for path, degrees in counts.items():
        pairs += [(path, count) for count in degrees if count <= gpus]
    for path, count in pairs:
        folder = (work / path.stem).absolute()
        out = record_path(None, folder, str(count), backend)
        place = folder / backend / str(count)
        if not out.is_file():
            lockstep.export_config(configs[path], "fp16", place / "graphs", count)
            names = {"assembly": str(place / "graphs" / "assembly.json"), "work": str(place), "out": str(out)}
            names |= {"weights": str(folder / "weights"), "backend": backend}
            cold.ask(
                "benchmarks.ranks:measure", **names, rounds=rounds, options=build_options,
                config=configs[path], alike=path.stem in ALIKE, layers=CHECK_LAYERS.get(path.stem, ("all",)),
            )  # fmt: skip
        cases.setdefault(path.stem, {})[str(count)] = read_json(out)
        written = record_path(write, work, "ranks", backend)
        write_json(written, record := record_of(cases, bool(os.environ.get(ONE_GPU))))
        written.with_suffix(".md").write_text(page(record), encoding="utf-8")
    print(written)


@dataclass(frozen=True)
class Aim:
    """An aim: `at_least`, or `at_most`, for a figure of `figures`. vllm: the same figure of vLLM 0.23.0."""

    shape: str
    ranks: int
    figure: str
    at_least: float | None = None
    at_most: float | None = None
    vllm: float | None = None

    def met(self, value: float | None) -> bool | None:
        """None where nothing was measured."""
        if value is None:
            return None
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


AIMS = (
    Aim("llama-2-7b", 2, "decode 1: times one GPU", at_least=1.65),
    Aim("llama-2-7b", 4, "decode 1: times one GPU", at_least=2.5),
    Aim("llama-2-7b", 2, "decode 1: tokens/s", at_least=400, vllm=307),
    Aim("llama-2-7b", 4, "decode 1: tokens/s", at_least=610, vllm=369),
    Aim("llama-2-7b", 2, "decode 16: times one GPU", at_least=1.6),
    Aim("llama-2-7b", 4, "decode 16: times one GPU", at_least=2.5),
    Aim("llama-2-7b", 2, "decode 16: tokens/s", vllm=3988),
    Aim("llama-2-7b", 4, "decode 16: tokens/s", vllm=5412),
    Aim("llama-2-7b", 2, "prompt: ms", at_most=33, vllm=35.2),
    Aim("llama-2-7b", 4, "prompt: ms", at_most=22, vllm=37.0),
    Aim("llama-3-70b", 4, "build: s", at_most=60),
    Aim("llama-3-70b", 4, "ready: s", at_most=60, vllm=172),
    Aim("llama-3-70b", 4, "decode 1: tokens/s", at_least=92, vllm=82.8),
    Aim("llama-3-70b", 4, "decode 16: tokens/s", at_least=1300, vllm=1230),
    Aim("llama-3-70b", 4, "prompt: ms", at_most=135, vllm=141.6),
    Aim("llama-3-70b", 4, "logits 2 layers: times fp16 of transformers", at_most=2),
    Aim("llama-3-70b", 4, "logits 16 layers: times fp16 of transformers", at_most=2),
)


def count_gpus(ranks: int) -> int:
    """Return the number of GPUs that this process sees. `ranks` where all are to run on the first, for checks."""
    from lockstep_gpu import cuda

    if os.environ.get(ONE_GPU):
        return ranks
    return cuda.device_count()


def measure(
    assembly: str,
    work: str,
    weights: str,
    out: str,
    rounds: int,
    backend: str,
    options: Mapping[str, Any],
    config: Mapping[str, Any],
    alike: bool,
    layers: Sequence[int | str],
) -> None:
    """Measure one shape at one number of ranks.

    For `cold.ask`: arguments are JSON.

    work: for its engines. weights: a folder for the shape's weights and transformers' logits, which all numbers of
    ranks share. layers: depths at which logits are compared with transformers'.
    """
    path = Path(assembly)
    folder = Path(weights)
    missing = [count for count in layers if not (folder / f"reference-{count}.npz").is_file()]
    if missing:
        probe()
    parsed = Assembly.load(path)
    file = folder / "weights.json"
    if not file.is_file():
        file = random_weights(parsed, folder, alike)
    if missing:
        references(folder, file, config, missing)
    engines = Path(work) / "engines" / "engines.json"
    record: dict[str, Any] = {"build_seconds": build_seconds(path, engines, backend, {**LIMITS, **options})}
    record |= described(engines)
    _read(folder / "weights.bin")
    record["ready_seconds"] = ready_seconds(engines, path, file)
    model = ready(engines, path, file)
    record["decode"] = {str(batch): decode(model, batch, rounds) for batch in BATCHES}
    record["prompt"] = prefill(model, rounds, parsed)
    if parsed.tensor_parallel is not None:
        record["sums"] = sums(model)
    del model
    record["check"] = {
        str(count): check(engines, path, file, count, folder / f"reference-{count}.npz") for count in layers
    }
    write_json(Path(out), record)


def _read(path: Path) -> None:
    """Have a file in the page cache."""
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 26):
            pass


def figures(case: Mapping[str, Any], one_gpu_case: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Return the numbers of a case, by the names of aims. one_gpu_case: the same shape on one GPU."""
    numbers: dict[str, float | None] = {"build: s": case["build_seconds"], "ready: s": case["ready_seconds"]}
    for batch, row in by_size(case["decode"]):
        numbers[f"decode {batch}: tokens/s"] = row["tokens_per_second"]
        if one_gpu_case is not None and one_gpu_case is not case:
            ratio = row["tokens_per_second"] / one_gpu_case["decode"][batch]["tokens_per_second"]
            numbers[f"decode {batch}: times one GPU"] = round(ratio, 2)
    numbers["prompt: ms"] = case["prompt"]["milliseconds"]["median"]
    for layers, row in case["check"].items():
        ours = row["max_logit_error"]
        theirs = row["max_logit_error_of_transformers_fp16"]
        of_theirs = float("inf")
        if ours is not None and theirs:
            of_theirs = round(ours / theirs, 2)
        numbers[f"logits {layers} layers: times fp16 of transformers"] = of_theirs
    return numbers


def record_of(cases: Mapping[str, Mapping[str, Any]], one_gpu: bool) -> dict[str, Any]:
    """Return the record.

    cases: by shape and number of ranks. one_gpu: the ranks ran on the first GPU: no aim is judged.
    """
    rows = list[dict[str, Any]]()
    for shape in sorted({*cases, *RANKS}):
        rows += _rows(shape, cases.get(shape, {}), one_gpu)
    return {"benchmark": "ranks", "ranks_on_one_gpu": one_gpu, "cases": cases, "aims": rows}


def _rows(shape: str, cases: Mapping[str, Any], one_gpu: bool) -> Iterator[dict[str, Any]]:
    """Return a row for each figure that was measured, and for each aim.

    Aims have one whether they were measured or not.
    """
    aims = {(aim.ranks, aim.figure): aim for aim in AIMS if aim.shape == shape}
    numbers = {int(ranks): figures(case, cases.get("1")) for ranks, case in cases.items()}
    for ranks in sorted({*numbers, *(ranks for ranks, _ in aims)}):
        measured = numbers.get(ranks, {})
        names = dict.fromkeys([*measured, *(figure for count, figure in aims if count == ranks)])
        for figure in names:
            aim = aims.get((ranks, figure), Aim(shape, ranks, figure))
            value = measured.get(figure)
            aimed = aim.at_least is not None or aim.at_most is not None
            yield {
                "shape": shape,
                "ranks": ranks,
                "figure": figure,
                "found": None if value == float("inf") else value,
                "at_least": aim.at_least,
                "at_most": aim.at_most,
                "vllm": aim.vllm,
                "met": aim.met(value) if aimed and not one_gpu else None,
            }


def page(record: Mapping[str, Any]) -> str:
    """Return the record as Markdown."""
    first_shape = next(iter(record["cases"].values()))
    case = next(iter(first_shape.values()))
    lines = [
        "# Several GPUs",
        "",
        paragraph(
            f"fp16, random weights, on {case['device']['name']} with {in_words(case)}, behind 512 tokens, a prompt of "
            "2048. Made by `python -m benchmarks ranks --work FOLDER --write records"
            f"{' --backend tensorrt' if case.get('backend') == 'tensorrt' else ''}`. ready: from the start of a "
            "process, with the weights in the page cache. vLLM: 0.23.0 on another machine of this kind."
        ),
    ]
    if record["ranks_on_one_gpu"]:
        lines += ["", "**All ranks ran on one GPU: a check of the command; its speeds say nothing.**"]
    rows = [
        [
            row["shape"],
            row["ranks"],
            row["figure"],
            _text(row["found"], "not run"),
            _aim_text(row),
            _text(row["vllm"], ""),
            {True: "yes", False: "no", None: ""}[row["met"]],
        ]
        for row in record["aims"]
    ]
    head = ["shape", "GPUs", "figure", "found", "aim", "vLLM", "met"]
    lines += ["", *table(head, rows)]
    for shape, by_ranks in record["cases"].items():
        for ranks, case in by_ranks.items():
            if sums_by_tokens := case.get("sums"):
                cells = [
                    [f"{tokens} x {row['hidden']}", row["microseconds"]["median"]]
                    for tokens, row in by_size(sums_by_tokens)
                ]
                lines += ["", f"A sum over {ranks} ranks of {shape}:", ""]
                lines += table(["tokens x hidden", "microseconds"], cells)
    return "\n".join(lines) + "\n"


def _aim_text(row: Mapping[str, Any]) -> str:
    if row["at_least"]:
        return f"at least {row['at_least']}"
    if row["at_most"]:
        return f"at most {row['at_most']}"
    return ""


def _text(value: float | None, missing: str) -> str:
    if value is None:
        return missing
    return str(value)
