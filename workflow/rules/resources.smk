# What jobs ask of a cluster: memory, minutes and GPUs. Locally only `gpu` counts, unless `--resources mem_mb=N` is given.

import functools

from lockstep.artifacts.fetched import folder_of

# What a model on the hub is taken to weigh while no file of it is there: in a dry run, before it was fetched.
UNKNOWN_BYTES = 16_000_000_000


def bytes_of(folder, files):
    """Of weights in 16 bits, as which those that are quantised already count: references hold their numbers."""
    packing = read_shape(Path(folder)).packing
    return sum(map(os.path.getsize, files)) * 16 // (packing.bits if packing else 16)


# Bytes of weights by model, looked up once. A checkpoint that a job brings is added when it is there.
WEIGHT_BYTES = {model: bytes_of(FOLDERS[model], files) for model, files in WEIGHT_FILES.items()}


@functools.cache
def expected_bytes(model):
    """What weights will weigh in 16 bits that a job brings or makes."""
    if KINDS[model] is GgufSource:
        return 4 * os.path.getsize(SOURCES[model])  # 4 bits or more in the file
    if KINDS[model] is RandomSource:
        return 2 * (read_shape(SOURCES[model]).num_parameters or 0)
    return UNKNOWN_BYTES


def weight_bytes(model):
    if model not in WEIGHT_BYTES:
        source = PLACE.source(model)
        if not source.is_file():
            return expected_bytes(model)
        folder = folder_of(source)
        WEIGHT_BYTES[model] = bytes_of(folder, folder.glob("*.safetensors"))
    return WEIGHT_BYTES[model]


def memory(base_mb, per_byte=0):
    """MB: for any model, and bytes more for each byte of weights; as much again with each attempt.

    Measured on models of 4 MB, 0.5 GB and 1.9 GB (records/clusters.md), with a third and more of room above the largest.
    """
    return lambda wildcards, attempt: attempt * (base_mb + round(per_byte * weight_bytes(wildcards.model) / 1e6))


def minutes(base, per_gb=0):
    """The time limit: for any model, and more for each 1,000,000,000 bytes of weights; as much again with each attempt."""
    return lambda wildcards, attempt: attempt * (base + round(per_gb * weight_bytes(wildcards.model) / 1e9))


def gpus(wildcards):
    """GPUs of a job; none where engines are built that cannot run here. `--resources gpu=N` says how many such jobs may
    run at once on one machine."""
    return 0 if wildcards.backend in NOT_RUN else CONFIG.gpus(wildcards.backend)


def gpus_of_ranks(wildcards):
    """GPUs of a job that runs the model: one for each rank. On one machine the limit lowers it: such a job then takes
    all that the run has."""
    return gpus(wildcards) * CONFIG.models[wildcards.model].tensor_parallel
