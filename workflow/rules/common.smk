# What all rules share: the config, checked before any job starts, and the names of all results.
#
# needs: config (Snakemake's merged mapping), REPOSITORY
# makes: CONFIG, LOCKED, SOURCES, ON_HUB, RANDOM, TARGETS, RESULTS, MANIFESTS, REPORTS, KEYS, and the functions below

from dataclasses import asdict

from lockstep.config import load as lockstep_config
from lockstep.provenance.code_identity import STAGES, stage_key
from lockstep.provenance.cache.store import cache_folder
from lockstep.checkpoint.resolve import side_files, weight_files
from lockstep.checkpoint.tensors import find_tensors
from lockstep.errors import LockstepError
from lockstep.provenance.locked import is_locked
from lockstep.report.renew import summarise
from lockstep.report.summary import outputs as summary_outputs
from lockstep.targets import Results, layer_count
from lockstep.config.sources import FolderSource, HubSource, RandomSource, parse_source

RESULTS = Results(Path("results"))
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
    LOCKED = is_locked(config)  # how to run, not what to make
    CONFIG = lockstep_config.load_merged(
        {key: value for key, value in config.items() if key != "locked"},
        workflow.configfiles,
    )
    SOURCES = CONFIG.check_sources([Path.cwd(), REPOSITORY])
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
    # A place where no cache can be is said here, and not by each job.
    cache_folder(CONFIG.cache)
    # What a change of the code or of the pinned packages reruns.
    KEYS = {rule: stage_key(entry) for rule, entry in STAGES.items()}

TARGETS = CONFIG.targets()
ON_HUB = sorted(model for model, kind in KINDS.items() if kind is HubSource)
RANDOM = sorted(model for model, kind in KINDS.items() if kind is RandomSource)
FETCHED = [str(RESULTS.source(model)) for model in [*ON_HUB, *RANDOM]]
# Bytes of weights: a smaller model is computed before more threads would pay.
SMALL = 100_000_000


wildcard_constraints:
    model="|".join(map(re.escape, sorted(CONFIG.models))),
    precision="fp32|fp16|bf16",
    layers="all|[1-9][0-9]*",
    backend="[a-z]+",


def one_of(models):
    """A wildcard's constraint to these models; without any it fits nothing."""
    return "|".join(map(re.escape, models)) or "(?!)"


def per_target(path, *fields, targets=TARGETS):
    """The results `path(model, ...)` of the targets, each once, in the config's order."""
    return list(
        dict.fromkeys(
            str(path(*(getattr(target, field) for field in fields)))
            for target in targets
        )
    )


VALIDATIONS = per_target(RESULTS.validation, "model", "precision", "layers")
GOLDENS = per_target(RESULTS.golden, "model", "precision", "layers", "backend")
SPEEDS = per_target(RESULTS.speed, "model", "precision", "layers", "backend")
ENGINES = per_target(RESULTS.engines, "model", "precision", "backend")
COMPARISONS = per_target(
    RESULTS.comparison,
    "model",
    "precision",
    "backend",
    targets=list(filter(CONFIG.is_compared, TARGETS)),
)
WEIGHTS = per_target(RESULTS.weights, "model", "precision")
REFERENCES = per_target(RESULTS.reference, "model", "layers")
ASSEMBLIES = per_target(RESULTS.assembly, "model", "precision")
MANIFESTS = [
    str(RESULTS.config()),
    *FETCHED,
    *per_target(RESULTS.checkpoint, "model"),
    *per_target(RESULTS.architecture, "model"),
    *WEIGHTS,
    *ASSEMBLIES,
    *ENGINES,
    *COMPARISONS,
    *VALIDATIONS,
    *REFERENCES,
    *(str(Path(reference).with_suffix(".safetensors")) for reference in REFERENCES),
    *GOLDENS,
    *SPEEDS,
]
PLOTS = [str(RESULTS.report(f"{name}.svg")) for name in ("error_by_layer", "speed")]
REPORTS = [*map(str, summary_outputs(RESULTS, TARGETS)), *PLOTS]


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
        logger.info(f"Summary of what has run: {summarise(RESULTS, TARGETS)}")
    except (LockstepError, OSError) as error:
        logger.error(f"no summary of what has run: {error}")


def log_of(rule, *wildcards):
    return str(RESULTS.log(rule, *wildcards))


def fetched(wildcards):
    """The manifest of a checkpoint that a job fetches or makes; nothing for a folder that is there."""
    is_fetched = wildcards.model not in FOLDERS
    return [RESULTS.source(wildcards.model)] if is_fetched else []


def golden_prompts(wildcards):
    """What a reference is made from: prompts and lengths, not the texts that are expected of them."""
    return CONFIG.reference_terms(wildcards.model)


def expected_texts(wildcards):
    """The text that each prompt must give at this layer count, None where the config expects none."""
    prompts = CONFIG.models[wildcards.model].golden.prompts
    return [prompt.expected.get(layer_count(wildcards.layers)) for prompt in prompts]


def tolerance(wildcards):
    return CONFIG.tolerance(wildcards.model, wildcards.precision).model_dump()


def compare_tolerance(wildcards):
    return CONFIG.compare_tolerance(wildcards.model, wildcards.precision)


def build_options(wildcards):
    """What the config says of a backend's build; a change of it builds again."""
    return CONFIG.build_options(wildcards.backend)


def interpreter(wildcards):
    """The Python that builds and runs a backend's engines; None is this one."""
    return CONFIG.interpreter(wildcards.backend)


def gpus(wildcards):
    """Whether a job uses the GPU; `--resources gpu=N` says how many such jobs may share it, one unless it is given."""
    return 1 if wildcards.backend == "tensorrt" else 0


def compute_threads(wildcards):
    """Threads of a job that computes a whole model. Snakemake lowers it to the cores it was given."""
    files = WEIGHT_FILES.get(wildcards.model)
    known_small = files is not None and sum(map(os.path.getsize, files)) < SMALL
    return 1 if known_small else 16
