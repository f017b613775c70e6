# What all rules share: the config, checked before any job starts, and the names of all results.
#
# needs: config (Snakemake's merged mapping), REPOSITORY
# makes: CONFIG, LOCKED, SOURCES, PACKED, ADAPTERS, ON_HUB, RANDOM, TARGETS, STEPS, RESULTS, PLACE, JOBS, PAGE, and the functions below

import functools
import gc

import snakemake.sourcecache

from lockstep.artifacts.files import check_writable
from lockstep.config import load as lockstep_config
from lockstep.config.backends import backends
from lockstep.config.types import PRECISIONS
from lockstep.pipeline.options import fetches_adapters
from lockstep.pipeline.stage import path_of
from lockstep.pipeline.stages import REPORTS as REPORT_STAGES
from lockstep.pipeline.stages import STAGES, all_steps
from lockstep.pipeline.wanted import all_jobs, jobs_of, names_pattern, wanted
from lockstep.provenance.code_identity import stage_key, untested
from lockstep.provenance.cache.store import cache_folder
from lockstep.checkpoint.resolve import side_files, weight_files
from lockstep.checkpoint.tensors import find_tensors
from lockstep.checkpoint.tokenizer_file import check_there
from lockstep.errors import LockstepError
from lockstep.provenance.locked import is_locked
from lockstep.report.renew import refresh, summarise
from lockstep.targets import Results, layer_count
from lockstep.config.sources import (
    FolderSource,
    HubSource,
    RandomSource,
    parse_source,
    read_shape,
)

# The objects of a plan stay until the run ends: looking for garbage among those of a thousand targets is a seventh of the time of planning.
gc.set_threshold(200_000)
# Snakemake takes the address of each job's script apart three times, and makes a class each time: an eighth of it.
snakemake.sourcecache.parse_uri = functools.cache(snakemake.sourcecache.parse_uri)

RESULTS = Results(Path("results"))
# Where these lie: Snakemake puts the `prefix` of a module before the paths of rules, and of nothing else.
PREFIXED = workflow.modifier.path_modifier.replace_prefix
PLACE = Results(Path(PREFIXED(str(RESULTS.root))))
MODEL, PRECISION, LAYERS, BACKEND = "{model}", "{precision}", "{layers}", "{backend}"


def display_paths(paths):
    """Relative to the working directory where both are in this checkout, so that no record holds where it lies."""
    inside = Path.cwd().is_relative_to(REPOSITORY)
    return [
        (
            os.path.relpath(path)
            if inside and path.is_relative_to(REPOSITORY)
            else str(path)
        )
        for path in paths
    ]


# One line and exit code 2 for a mistake in the config or a damaged checkpoint.
with guard():
    # Snakemake keeps its own files there, dry runs too, and would end in a traceback.
    check_writable(
        next(filter(os.path.exists, (".snakemake/locks", ".snakemake", "."))),
        "make it writable, or name another by --directory",
    )
    LOCKED = is_locked(config)  # how to run, not what to make
    CONFIG = lockstep_config.load_merged(
        {
            key: value
            for key, value in config.items()
            if key not in ("locked", "device")
        },
        workflow.configfiles,
    )
    SOURCES = CONFIG.check_sources([Path.cwd(), REPOSITORY], results=PLACE)
    KINDS = {
        name: type(parse_source(model.source)) for name, model in CONFIG.models.items()
    }
    # Models whose checkpoint is a folder that is there; of others, jobs make one first.
    FOLDERS = {
        model: SOURCES[model] for model, kind in KINDS.items() if kind is FolderSource
    }
    SIDE_FILES = {
        model: display_paths(side_files(folder)) for model, folder in FOLDERS.items()
    }
    WEIGHT_FILES = {
        model: display_paths(weight_files(folder, find_tensors(folder)))
        for model, folder in FOLDERS.items()
    }
    for folder in FOLDERS.values():
        check_there(folder)
    # Models whose weights are quantised already: graphs hang on which are.
    PACKED = {model for model, folder in FOLDERS.items() if read_shape(folder).packing}
    # Folders of adapters by model and name.
    ADAPTERS = {
        model: CONFIG.adapter_folders(model, [Path.cwd(), REPOSITORY], results=PLACE)
        for model in CONFIG.models
    }
    CONFIG.check_backends()
    # A place where no cache can be is said here, and not by each job.
    cache_folder(CONFIG.cache)
    # Only what this device is needed for is made: how to run, too.
    DEVICE = CONFIG.check_device(config.get("device"))
    # What a change of the code or of the pinned packages reruns, by rule and backend.
    KEYS = {
        (stage.name, backend): stage_key(stage.code, backend)
        for stage in STAGES.values()
        for backend in (backends() if "backend" in stage.wildcards else [None])
    } | {(rule, None): stage_key(code) for rule, code in REPORT_STAGES.items()}

TARGETS = CONFIG.targets()
NOT_RUN, NOT_BUILT = CONFIG.not_run(), CONFIG.not_built()
if workflow.is_main_process:
    if line := untested():
        logger.warning(line)
    for backend, reason in CONFIG.skipped_backends().items():
        logger.info(f"Left out: the targets of {backend}, for {reason}")
    for name, reason in NOT_RUN.items():
        what = "Neither built nor run" if name in NOT_BUILT else "Built, not run"
        logger.info(f"{what}: the targets of {name}, for {reason}")
ON_HUB = sorted(model for model, kind in KINDS.items() if kind is HubSource)
MADE = sorted(KINDS.keys() - FOLDERS.keys() - set(ON_HUB))
# Bytes of weights: a smaller model is computed before more threads would pay.
SMALL = 100_000_000


CONSTRAINTS = {
    "model": names_pattern(CONFIG.models),
    "precision": "|".join(PRECISIONS),
    "layers": "all|[1-9][0-9]*",
    "backend": "|".join([*backends(), *CONFIG.devices]),
}


wildcard_constraints:
    **CONSTRAINTS,


STEPS = all_steps(CONFIG, RESULTS, TARGETS)
# Names in paths stay wildcards.
WILDCARDS = {
    "model": MODEL,
    "precision": PRECISION,
    "layers": LAYERS,
    "backend": BACKEND,
}
# The file name of a target's page.
PAGE = "-".join(f"{{{name},{fits}}}" for name, fits in CONSTRAINTS.items()) + ".html"


def made_by(stage):
    """What the jobs of a stage make for all targets, in the config's order."""
    return [str(step.output) for step in STEPS if step.stage == stage]


def beside(stage):
    """What they make beside it."""
    return [
        str(path_of(name, RESULTS, step.names))
        for step in STEPS
        if step.stage == stage
        for name in STAGES[stage].beside
    ]


def inputs_of(stage):
    """The artefacts that a stage reads, by name, with wildcards; those that hang on the precision by functions."""
    entry = STAGES[stage]
    found = {name: path_of(name, RESULTS, WILDCARDS) for name in entry.reads}
    for name in entry.reads_quantized:
        found[name] = functools.partial(input_of, stage, name)
    return found


def input_of(stage, name, wildcards):
    """What a job reads under a name; nothing where its precision does not."""
    artefact = STAGES[stage].inputs(wildcards.precision).get(name)
    return path_of(artefact, RESULTS, names_of(wildcards)) if artefact else []


def reference_logits(wildcards):
    """Those that the engines of a target are held against."""
    names = names_of(wildcards)
    path = RESULTS.reference_of(names["model"], names["precision"], names["layers"])
    return path.with_suffix(".safetensors")


def output_of(stage):
    return path_of(STAGES[stage].makes, RESULTS, WILDCARDS)


def names_of(wildcards):
    names = {name: str(value) for name, value in wildcards.items()}
    if "layers" in names:
        names["layers"] = layer_count(names["layers"])
    return names


def options_of(stage):
    """What the config says to a job; a change of it runs the job again."""
    return lambda wildcards: STAGES[stage].options(CONFIG, **names_of(wildcards))


def key_of(stage):
    """Digests of the code and of the pinned packages that a job uses; a change of them runs it again."""
    if "backend" not in STAGES[stage].wildcards:
        return KEYS[stage, None]
    return functools.partial(_key_of, stage)


def _key_of(stage, wildcards):
    key = KEYS[stage, CONFIG.backend_of(wildcards.backend)]
    # Pins are of this interpreter; of another its own packages are recorded.
    elsewhere = interpreter(wildcards) and not STAGES[stage].runs_here_too
    return {"code": key["code"]} if elsewhere else key


SPEEDS = beside("golden")
# Every job that there can be, and those that a run is asked for.
JOBS = all_jobs(CONFIG, RESULTS, STEPS)
ASKED = JOBS
if DEVICE is not None:
    THERE = [target for target in TARGETS if target.backend == DEVICE]
    ASKED = [JOBS[0], *jobs_of(CONFIG, RESULTS, all_steps(CONFIG, RESULTS, THERE))]


# Where jobs that fail leave their exit codes. A job may be another process of Snakemake, which reads this file too.
EXIT_CODES = Path(
    os.environ.setdefault(
        "LOCKSTEP_EXIT_CODES", os.path.abspath(f".snakemake/{os.getpid()}.codes")
    )
)


def end_as_by_hand():
    """End with exit code 2 where jobs failed by nothing but the user's mistakes, as the stages by hand do; Snakemake's own is 1."""
    codes = EXIT_CODES.read_text().split() if EXIT_CODES.is_file() else []
    if EXIT_CODES.name == f"{os.getpid()}.codes":
        EXIT_CODES.unlink(missing_ok=True)
    if codes and set(codes) == {"2"}:
        raise SystemExit(2)


def summarise_failed_run():
    """The job below does not run then; what failed, and what has not run, stands in the table all the same."""
    try:
        logger.info(f"Summary of what has run: {summarise(PLACE, TARGETS, NOT_RUN)}")
    except (LockstepError, OSError) as error:
        logger.error(f"no summary of what has run: {error}")


def refresh_summary():
    """Have a summary that is there say what the checks say by now."""
    with guard():
        refresh(PLACE)


def log_of(rule, *wildcards):
    return str(RESULTS.log(rule, *wildcards))


def fetched(wildcards):
    """The manifest of a checkpoint that a job fetches or makes; nothing for a folder that is there."""
    is_fetched = wildcards.model not in FOLDERS
    return [RESULTS.source(wildcards.model)] if is_fetched else []


def interpreter(wildcards):
    """The Python that builds and runs a backend's engines; None is this one."""
    return CONFIG.interpreter(wildcards.backend)


# Where the config has devices: what a job must find, and what it asks a cluster for.
OF_DEVICE = (
    {"device": lambda wildcards: CONFIG.device_of(wildcards.backend)}
    if CONFIG.devices
    else {}
)
MODELS_OF_GPUS = {
    name: device.gpu_model
    for name, device in CONFIG.devices.items()
    if device.gpu_model
}
GPU_MODEL = (
    {"gpu_model": lambda wildcards: MODELS_OF_GPUS.get(wildcards.backend)}
    if MODELS_OF_GPUS
    else {}
)


ADAPTERS_ON_HUB = sorted(
    model for model in CONFIG.models if fetches_adapters(CONFIG, model)
)


def adapter_folders_here(model):
    """The folders of a model's adapters that no job brings."""
    fetched = STAGES["fetch_adapters"].options(CONFIG, model)["sources"]
    return [folder for name, folder in ADAPTERS[model].items() if name not in fetched]


def compute_threads(wildcards):
    """Threads of a job that computes a whole model. Snakemake lowers it to the cores it was given."""
    model = wildcards.model
    return 1 if model in FOLDERS and WEIGHT_BYTES[model] < SMALL else 16
