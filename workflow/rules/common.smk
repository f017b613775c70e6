# What all rules share: the config, checked before any job starts, and what their inputs and parameters are made of.

import gc
import shlex
import sys

from lockstep.artifacts.files import check_writable
from lockstep.checkpoint.resolve import side_files, weight_files
from lockstep.checkpoint.tensors import find_tensors
from lockstep.checkpoint.tokenizer_file import check_there
from lockstep.config import load as lockstep_config
from lockstep.config.backends import backends
from lockstep.config.sources import FolderSource, GgufSource, HubSource, RandomSource, parse_source, read_shape
from lockstep.config.types import PRECISIONS
from lockstep.errors import LockstepError
from lockstep.provenance.cache.store import cache_folder
from lockstep.provenance.code_identity import stage_key, untested
from lockstep.provenance.locked import check_project, find_lock, is_locked
from lockstep.report.renew import refresh, summarise
from lockstep.stages import STAGES, jobs
from lockstep.stages.fetch_adapters import on_hub
from lockstep.targets import Results, is_quantized

# The objects of a plan stay until the run ends: looking for garbage among those of a thousand targets is a seventh of the time of planning.
gc.set_threshold(200_000)


class Python(str):
    """Snakemake starts a script by "{python} {script:q}": the path of a .venv may have spaces, too."""

    def __format__(self, spec):
        return shlex.quote(self)


sys.executable = Python(sys.executable)

# Where the results lie: a module's `prefix` stands before them.
PLACE = Results(Path(rules.config.output[0]).parent)


def display_paths(paths):
    """Relative to the working directory where both are in this checkout, so that no record holds where it lies."""
    inside = Path.cwd().is_relative_to(REPOSITORY)
    return [(os.path.relpath(path) if inside and path.is_relative_to(REPOSITORY) else str(path)) for path in paths]


# One line and exit code 2 for a mistake in the config or a damaged checkpoint.
with guard():
    # Snakemake keeps its own files there, dry runs too, and would end in a traceback.
    check_writable(
        next(filter(os.path.exists, (".snakemake/locks", ".snakemake", "."))),
        "make it writable, or name another by --directory",
    )
    LOCKED = is_locked(config)  # how to run, not what to make
    CONFIG = lockstep_config.load_merged(
        {key: value for key, value in config.items() if key not in ("locked", "device", "container")},
        workflow.configfiles,
        options=workflow.config_settings.config,
    )
    SOURCES = CONFIG.check_sources([Path.cwd(), REPOSITORY], results=PLACE)
    KINDS = {name: type(parse_source(model.source)) for name, model in CONFIG.models.items()}
    # Models whose checkpoint is a folder that is there; of others, jobs make one first.
    FOLDERS = {model: SOURCES[model] for model, kind in KINDS.items() if kind is FolderSource}
    SIDE_FILES = {model: display_paths(side_files(folder)) for model, folder in FOLDERS.items()}
    WEIGHT_FILES = {
        model: display_paths(weight_files(folder, find_tensors(folder))) for model, folder in FOLDERS.items()
    }
    for folder in FOLDERS.values():
        check_there(folder)
    # Models whose weights are quantised already: graphs hang on which are.
    PACKED = {model for model, folder in FOLDERS.items() if read_shape(folder).packing}
    # Folders of adapters by model and name.
    ADAPTERS = {
        model: CONFIG.adapter_folders(model, [Path.cwd(), REPOSITORY], results=PLACE) for model in CONFIG.models
    }
    CONFIG.check_backends()
    # A place where no cache can be is said here, and not by each job.
    cache_folder(CONFIG.cache)
    # Only what this device is needed for is made: how to run, too.
    DEVICE = CONFIG.check_device(config.get("device"))
    # What a change of the code or of the pinned packages reruns, by stage and backend.
    KEYS = {
        (stage.name, backend): stage_key(stage.module, backend)
        for stage in STAGES.values()
        for backend in (backends() if "backend" in stage.wildcards else [None])
    }

TARGETS = CONFIG.targets()
NOT_RUN, NOT_BUILT = CONFIG.not_run(), CONFIG.not_built()
if workflow.is_main_process:
    if line := untested():
        logger.warning(line)
    for backend, reason in CONFIG.skipped_backends().items():
        logger.info(f"Left out: the targets of {backend}, for {reason}")
    for name, reason in NOT_RUN.items():
        what = "Neither built nor run" if name in NOT_BUILT else "Built, not run"
        logger.info(f"{what}: the targets of {name}, which {reason}")
    for backend, reason in CONFIG.built_elsewhere().items():
        logger.warning(f"Builds of {backend} fail on this machine: it {reason} (with --keep-going the rest is made)")


def names_pattern(names):
    """A regular expression of some names; of none, one that fits nothing."""
    return "|".join(map(re.escape, sorted(names))) or "(?!)"


def of_kind(*kinds):
    """A regular expression of the models whose source is of one of these kinds."""
    return names_pattern(model for model, kind in KINDS.items() if kind in kinds)


CONSTRAINTS = {
    "model": names_pattern(CONFIG.models),
    "precision": "|".join(PRECISIONS),
    "layers": "all|[1-9][0-9]*",
    "backend": "|".join([*backends(), *CONFIG.devices]),
}


wildcard_constraints:
    **CONSTRAINTS,


# All jobs that there can be.
JOBS = jobs(CONFIG, Path("<results>"), TARGETS)
# The file name of a target's page.
PAGE = "-".join(f"{{{name},{fits}}}" for name, fits in CONSTRAINTS.items()) + ".html"


def made_by(stage):
    """What the jobs of a stage make for all targets, in the config's order."""
    return [str(job.output) for job in JOBS if job.stage == stage]


def final_files():
    """What a run is asked for: the report of all targets; with `--config device=NAME` what that device is needed for."""
    config = "<results>/config.json"
    if DEVICE is None:
        read = {path for stage in STAGES.values() for path in stage.all_reads()}
        # Checks too: a run that was stopped or failed leaves a summary without them, for which they need not run, and
        # what was made of their last pass.
        ends = [name for name, stage in STAGES.items() if stage.is_judged or stage.output not in read]
        others = [str(job.output) for job in JOBS if job.stage in ends]
        return [config, "<results>/summary.json", *others]
    targets = [target for target in TARGETS if target.backend == DEVICE]
    there = jobs(CONFIG, Path("<results>"), targets)
    return [config, *(str(job.output) for job in there if "backend" in job.names)]


def options_of(stage):
    """What the config says to a job; a change of it runs the job again."""
    return lambda wildcards: STAGES[stage].options(CONFIG, dict(wildcards.items()))


def key_of(stage):
    """Digests of the code and of the pinned packages that a job uses; a change of them runs it again."""
    if "backend" not in STAGES[stage].wildcards:
        return KEYS[stage, None]

    return lambda wildcards: KEYS[stage, CONFIG.backend_of(wildcards.backend)]


def device(wildcards):
    """What a job must find, where its backend is a device of the config; None where it is not."""
    return CONFIG.device_of(wildcards.backend)


# What a job asks a cluster for, where the config has devices.
GPU_MODELS = {name: device.gpu_model for name, device in CONFIG.devices.items() if device.gpu_model}
GPU_MODEL = {"gpu_model": lambda wildcards: GPU_MODELS.get(wildcards.backend)} if GPU_MODELS else {}


def fetched(wildcards):
    """The manifest of a checkpoint that a job fetches or makes; nothing for a folder that is there."""
    is_folder = wildcards.model in FOLDERS
    return [] if is_folder else f"<results>/{wildcards.model}/source.json"


def tokenizer_beside(wildcards):
    """The tokenizer beside the config.json of random weights."""
    path = SOURCES[wildcards.model].with_name("tokenizer.json")
    is_random = KINDS[wildcards.model] is RandomSource
    return display_paths([path]) if is_random and path.is_file() else []


def assembly_if_quantized(wildcards):
    if not is_quantized(wildcards.precision):
        return []
    return f"<results>/{wildcards.model}/{wildcards.precision}/graphs/assembly.json"


def of_precision(folder, suffix=".json"):
    """A reference that engines are held against: of quantised weights their own, else that of the model."""

    def path(wildcards):
        model, precision = wildcards.model, wildcards.precision
        owner = f"{model}/{precision}" if is_quantized(precision) else model
        return f"<results>/{owner}/{folder}/{wildcards.layers}{suffix}"

    return path


def fetched_adapters(wildcards):
    return f"<results>/{wildcards.model}/adapter_sources.json" if on_hub(CONFIG, wildcards.model) else []


def adapter_files(wildcards):
    """The files of a model's adapters that no job brings."""
    brought = on_hub(CONFIG, wildcards.model)
    folders = ADAPTERS[wildcards.model].items()
    here = [folder for name, folder in folders if name not in brought]
    return display_paths(path for folder in here for path in sorted(folder.glob("adapter_*")))


def adapter_folders(wildcards):
    folders = ADAPTERS[wildcards.model]
    return dict(zip(folders, display_paths(folders.values())))


def compute_threads(wildcards):
    """Threads of a job that computes a whole model. Snakemake lowers it to the cores it was given."""
    size = weight_bytes(wildcards.model)
    # Of less, more threads do not pay: several jobs beside each other do.
    if size < 100_000_000:
        return 1
    return 4 if size < 2_000_000_000 else 16


if LOCKED and workflow.is_main_process:
    # What is or will be another thing than the locks say is refused before any job.
    with guard():
        for model in CONFIG.models:
            targets = [target for target in TARGETS if target.model == model]
            files = [*map(Path, [*SIDE_FILES[model], *WEIGHT_FILES[model]])] if model in FOLDERS else None
            check_project(find_lock(model, [Path(), REPOSITORY]), jobs(CONFIG, PLACE.root, targets), files)
