# What jobs ask of a cluster: memory, minutes and GPUs. Locally only `gpu` counts, unless `--resources mem_mb=N` is given.
#
# needs: CONFIG, STAGES, WEIGHT_FILES, PLACE, NOT_RUN
# makes: the functions `memory`, `minutes`, `gpus` and `gpus_of_ranks` for `resources:`

from lockstep.artifacts.fetched import folder_of
from lockstep.pipeline.resources import UNKNOWN_BYTES
from lockstep.targets import MOST_RANKS


def bytes_of(folder, files):
    """Of weights in 16 bits, as which those that are quantised already count: references hold their numbers."""
    packing = read_shape(Path(folder)).packing
    return sum(map(os.path.getsize, files)) * 16 // (packing.bits if packing else 16)


# Bytes of weights by model, looked up once. A checkpoint that a job brings is added when it is there.
WEIGHT_BYTES = {
    model: bytes_of(FOLDERS[model], files) for model, files in WEIGHT_FILES.items()
}


def weight_bytes(model):
    if model not in WEIGHT_BYTES:
        source = PLACE.source(model)
        if not source.is_file():
            return UNKNOWN_BYTES
        folder = folder_of(source)
        WEIGHT_BYTES[model] = bytes_of(folder, folder.glob("*.safetensors"))
    return WEIGHT_BYTES[model]


def memory(stage):
    """MB; more with each attempt."""
    return lambda wildcards, attempt: STAGES[stage].resources.memory_mb(
        weight_bytes(wildcards.model), attempt
    )


def minutes(stage):
    """The time limit; more with each attempt."""
    return lambda wildcards, attempt: STAGES[stage].resources.time_limit(
        weight_bytes(wildcards.model), attempt
    )


def gpus(wildcards):
    """GPUs of a job; none where engines are built that cannot run here. `--resources gpu=N` says how many such jobs may
    run at once on one machine."""
    return 0 if wildcards.backend in NOT_RUN else CONFIG.gpus(wildcards.backend)


# Snakemake lowers what a job asks for to the limit of the run, and `gpu: 1` of profiles/default goes before any other
# profile. A cluster's jobs have GPUs of their own (the profiles' `set-resource-scopes`), and may ask for more.
if workflow.resource_scopes.is_local("gpu"):
    workflow.global_resources["gpu"] = MOST_RANKS


def gpus_of_ranks(wildcards):
    """GPUs of a job that runs the model: one for each rank. On one machine the limit lowers it: such a job then takes
    all that the run has."""
    return gpus(wildcards) * CONFIG.models[wildcards.model].tensor_parallel
