"""`dag`: what a config of many models costs before its jobs and between them.

Planning, a run with nothing to do, the scheduler.

In: numbers of targets, five layer counts in two precisions of each of several tiny models that are copies of one. Out:
seconds of `snakemake -n` in a new folder, less those of an empty workflow; beside it the same jobs as bare rules, which
is Snakemake's own part; of a finished folder the plan, a run with nothing to do, and one in which Snakemake takes each
job from its queue, touches what it made and records it.

A finished folder of many models is one model that ran, its results copied under the other names and recorded by
`snakemake --touch`. The summary of all of them is then made by its own job.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lockstep
from benchmarks import options
from benchmarks.child import Usage, run_child
from benchmarks.measure import deliver, ratios, spread, surroundings, write_json
from lockstep import CheckError
from lockstep.config import load
from lockstep.stages import STAGES, Job, jobs

OPTIONS = (
    options.number("--targets", (100, 1000), "To plan.", 10, many=True),
    options.number(
        "--finished", (100, 1000), "To plan again once they are there, and to take from the queue.", 10, many=True,
    ),
    options.path(
        "--before", "Another checkout of the repository, to be timed beside this one.", metavar="CHECKOUT", exists=True
    ),
    options.rounds(), options.WRITE,
)  # fmt: skip
REPOSITORY = Path(__file__).resolve().parents[1]
LAYERS, PRECISIONS = (1, 2, 3, 4, 5), ("fp32", "fp16")
PER_MODEL = len(LAYERS) * len(PRECISIONS)
LIMITS = {"max_batch_size": 2, "max_input_len": 8, "max_seq_len": 16, "max_num_tokens": 16}
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
_LIMIT = 3600.0  # seconds of one command
_NOTHING = "rule all:\n    input: []\n"


def main(targets: Sequence[int], finished: Sequence[int], before: Path | None, rounds: int, write: Path | None) -> None:
    """Many targets: planning, a run with nothing to do, the scheduler's part of a job."""
    deliver(run(targets, finished, rounds, before and before.absolute()), write)


def run(counts: Sequence[int], finished: Sequence[int], rounds: int, before: Path | None = None) -> dict[str, Any]:
    """Time everything in turn, `rounds` times.

    counts, finished: numbers of targets to plan, and of those to plan again once they are there; multiples of ten.
    before: another checkout, whose plans are timed beside those of this one.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = _checkpoint(folder / "tiny")
        one = _new(folder / "one", PER_MODEL, checkpoint)
        if finished:
            _snakemake(one, "--cores", "2")
        done, queues = {count: folder / f"finished-{count}" for count in finished}, {}
        for count, place in done.items():
            queues[count] = _finish(_new(place, count, checkpoint), one)
        contestants = {"empty workflow": lambda: _bare(folder / "empty", _NOTHING)}
        for count in counts:
            place, rules = _new(folder / str(count), count, checkpoint), bare_rules(_config(count))
            contestants[f"plan of {count}"] = lambda place=place: _snakemake(place, "-n")
            contestants[f"bare rules of {count}"] = lambda place=folder / f"bare-{count}", rules=rules: _bare(
                place, rules
            )
            if before:
                contestants[f"plan of {count}, before"] = lambda place=place: _snakemake(place, "-n", checkout=before)
        for count, place in done.items():
            contestants[f"plan of {count} that are there"] = lambda place=place: _snakemake(place, "-n")
            contestants[f"nothing to do for {count}"] = lambda place=place: _snakemake(place, "--cores", "2")
        spent = _in_turn(contestants, rounds)
    return {
        "benchmark": "dag", "rounds": rounds, "targets_per_model": PER_MODEL,
        "jobs": {str(count): _count(_config(count)) for count in {*counts, *finished}},
        **figures(spent, counts, queues), **surroundings("snakemake"),
    }  # fmt: skip


def figures(spent: Mapping[str, Sequence[Usage]], counts: Sequence[int], queues: Mapping[int, Usage]) -> dict[str, Any]:
    """Return the medians of all, and what they come to for a target and for a job.

    A contestant's figure is less the empty workflow's, round by round. queues: the run that touched everything, by
    number of targets; Snakemake sleeps 0.1 s before it touches what a job made, so that CPU seconds are what counts.
    """
    empty = spent["empty workflow"]

    def per(name: str, parts: int) -> dict[str, Any]:
        pairs = list(zip(spent[name], empty, strict=True))
        return {
            "seconds": spread([(one.seconds - other.seconds) / parts for one, other in pairs]),
            "cpu_seconds": spread([(one.cpu_seconds - other.cpu_seconds) / parts for one, other in pairs]),
        }

    named = {name: [one.cpu_seconds for one in values] for name, values in spent.items()}
    faster = {
        str(count): ratios({name: named[name] for name in (f"plan of {count}", f"plan of {count}, before")}, of)
        for count in counts
        for of in [f"plan of {count}"]
        if f"{of}, before" in named
    }
    return {
        "spent": {
            name: {"seconds": spread([one.seconds for one in values]), "cpu_seconds": spread(named[name])}
            for name, values in spent.items()
        },
        "plan_per_target": {str(count): per(f"plan of {count}", count) for count in counts},
        "bare_rules_per_target": {str(count): per(f"bare rules of {count}", count) for count in counts},
        "nothing_to_do_per_target": {str(count): per(f"nothing to do for {count}", count) for count in queues},
        "queue_per_job": {
            str(count): {
                "cpu_seconds": round(
                    (queue.cpu_seconds - statistics.median(named[f"plan of {count} that are there"]))
                    / _count(_config(count)),
                    6,
                )
            }
            for count, queue in queues.items()
        },
        **({"before_to_now": faster} if faster else {}),
    }


def bare_rules(config: Mapping[str, Any]) -> str:
    """Return a Snakefile of the same jobs with the same files.

    Its rules have wildcards and nothing else.
    """
    made = _jobs(config)
    used, ends = {job.stage for job in made}, ("config", "validate", "build", "compare", "golden", "served")
    shown = [str(job.output) for job in made if job.stage in ends]
    text = "wildcard_constraints:\n" + "".join(
        f"    {name}='[^/]+',\n" for name in ("model", "precision", "layers", "backend")
    )
    text += f"rule all:\n    input: {shown!r}\n"
    for stage in (entry for name, entry in STAGES.items() if name in used):
        inputs, outputs = (
            [f"results/{pattern}" for pattern in group]
            for group in (stage.reads.values(), (stage.output, *stage.beside.values()))
        )
        text += f"rule {stage.name}:\n    input: {inputs!r}\n    output: {outputs!r}\n    shell: 'true'\n"
    return text


def _config(count: int) -> dict[str, Any]:
    if count % PER_MODEL:
        raise lockstep.InputError(f"targets: expected a multiple of {PER_MODEL}, found {count}")
    golden = {"max_new_tokens": 2, "long_prompt": 0, "prompts": [{"text": "ab"}]}
    model = {"layers": list(LAYERS), "precisions": list(PRECISIONS), "golden": golden}
    names = [f"tiny-{number:04d}" for number in range(count // PER_MODEL)]
    return {"models": {name: {**model, "source": f"models/{name}"} for name in names}, "limits": LIMITS}


def _count(config: Mapping[str, Any]) -> int:
    """Return the number of jobs, with those of the config, the summary and the plots."""
    return len(_jobs(config)) + 3


def _jobs(config: Mapping[str, Any]) -> list[Job]:
    typed = load.load(config)
    return jobs(typed, Path("results"), typed.targets())


def _checkpoint(folder: Path) -> Path:
    write_json(folder / "shape.json", SHAPE)
    return Path(lockstep.make_random_checkpoint(folder / "shape.json", 0, folder / "checkpoint"))


def _new(folder: Path, count: int, checkpoint: Path) -> Path:
    """Make a folder with a config of `count` targets and the checkpoints it names."""
    config = _config(count)
    for name in config["models"]:
        shutil.copytree(checkpoint, folder / "models" / name, copy_function=os.link)
    write_json(folder / "config.json", config)
    return folder


def _finish(folder: Path, one: Path) -> Usage:
    """Put the results of one model, in the folder `one`, under the names of all.

    Returns what it took to take each job from the queue, touch what it made and record it.
    """
    names = sorted((folder / "models").iterdir())
    shutil.copytree(one / "results", folder / "results")
    for path in names[1:]:
        shutil.copytree(one / "results" / names[0].name, folder / "results" / path.name)
    touched = _snakemake(folder, "--cores", "2", "--touch", "--forceall")
    _snakemake(folder, "--cores", "2", "--forcerun", "config", "summary", "plots")
    return touched


def _snakemake(folder: Path, *arguments: str, checkout: Path = REPOSITORY) -> Usage:
    command = ["--snakefile", str(checkout / "Snakefile"), "--directory", str(folder), *arguments]
    return _spent([*command, "--configfile", str(folder / "config.json"), "--quiet", "all"], checkout)


def _bare(folder: Path, rules: str) -> Usage:
    folder.mkdir(exist_ok=True)
    (folder / "Snakefile").write_text(rules)
    return _spent(
        ["--snakefile", str(folder / "Snakefile"), "--directory", str(folder), "-n", "--quiet", "all"], folder
    )


def _spent(arguments: Sequence[str], folder: Path) -> Usage:
    variables = {"PYTHONDONTWRITEBYTECODE": ""}  # what is kept between starts is kept here too
    if (folder / "src").is_dir():
        variables["PYTHONPATH"] = str(folder / "src")
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        spent = run_child([sys.executable, "-m", "snakemake", *arguments], Path(log.name), _LIMIT, variables)
    if spent.reason:
        raise CheckError(f"snakemake {' '.join(arguments)}: {spent.reason}")
    return spent


def _in_turn(contestants: Mapping[str, Callable[[], Usage]], rounds: int) -> dict[str, list[Usage]]:
    """Run each once a round in turn, after one round that does not count.

    See `measure.in_turn`.
    """
    found: dict[str, list[Usage]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, contestant in contestants.items():
            spent = contestant()
            if number:
                found[name].append(spent)
    return found
