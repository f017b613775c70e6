# Resources of jobs on a cluster: memory, minutes and GPUs. Locally only `gpu` counts, unless `--resources mem_mb=N` is given.


def weight_bytes(model):
    """Bytes of a model's weights in 16 bits."""
    files = plan()["models"][model]
    folder = Path(RESULTS, model, "checkpoint")
    if files["kind"] != "hub" or not folder.with_name("source.json").is_file():
        return files["bytes"]
    # The plan was made before this run fetched it.
    quantized = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    bits = 4 if quantized.get("quant_method") == "mxfp4" else quantized.get("bits", 16)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) * 16 // bits


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
    return plan()["gpus"][wildcards.backend]


def gpus_of_ranks(wildcards):
    """GPUs of a job that runs the model: one for each rank. On one machine the limit lowers it: such a job then takes
    all that the run has."""
    return gpus(wildcards) * plan()["models"][wildcards.model]["tensor_parallel"]


# The model of GPU that a job asks a cluster for, where the config has devices.
GPU_MODELS = PLAN.get("gpu_models")
GPU_MODEL = {"gpu_model": lambda wildcards: GPU_MODELS.get(wildcards.backend)} if GPU_MODELS else {}
