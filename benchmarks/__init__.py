"""Benchmarks: each writes JSON with the hardware and the versions it ran on. Comparisons run side by side in one
process, in turn.

What a user can do is measured through the public API, `import lockstep`. Below it only the modules of `INSIDE` are
imported; tests/unit/test_api.py holds the list.
"""

# Module of lockstep: why the public API does not do.
INSIDE = {
    # Records are written, and manifests read, as the package does it.
    "artifacts": "formats of manifests that are read or made up",
    "artifacts.adapters": "where graphs take adapters",
    "artifacts.assembly": "graphs and layers of an export",
    "artifacts.dtypes": "weights that are made up, by their types",
    "artifacts.quantized": "the same, of integers and scales",
    "artifacts.engines": "the manifest of engines that are of no assembly",
    "artifacts.signature": "inputs and outputs of graphs",
    "artifacts.files": "JSON, digests, files written whole or not at all",
    "cli.stages": "the option that names the results tree",
    "cli.guarded": "`python -m benchmarks` ends with one line on a mistake, as `lockstep` does",
    "config": "the jobs of a config of many models",
    "pipeline.stages": "the same",
    "pipeline.wanted": "the same",
    "pipeline": "worker: measures and plants faults in the Python that a backend runs in",
    # What the numbers were measured on.
    "backends.cpu": "the CPU and its threads",
    # Faults are planted in what nobody is to change.
    "backends": "default options of a build",
    "backends.tensorrt.fused_attention": "fused attention goes wrong",
    "config.backends": "the tolerance of an engine beside its graph",
    "config.types": "the default tolerances",
    "onnx_tools.graph_types": "types of the values in a graph that is edited",
    "step.pages": "a pool of pages for the scheduler alone",
    "step": "the KV cache, the plan and the host's step go wrong",
    "runtime.tokenizer": "a tokenizer for shapes that have none",
    "serve.bodies": "the same",
    "serve.run": "a server on engines that are of no target",
    "serve.service": "the same",
    "serve.settings": "the same",
    "runtime.scheduler": "what the scheduler's share of a step takes",
    # Exports of shapes and of tiny models, which are no checkpoints.
    "export.parity": "depths at which a model has all its kinds of layers",
    "export.quiet": "transformers says nothing while it is timed",
    "export.run": "graphs from a config.json alone",
    "export.small_configs": "a config as small as its class takes it",
    "export.torch_model": "transformers' model beside ours",
    "export.tracer": "a model without weights, to see its layers",
    "export.unique_layers": "which layers are alike",
    # The unsplit model that decoding is compared with is made from the split one.
    "export.compose": "the domain of the functions that graphs are made of",
    "weights": "arrays of slots",
    # Builds and engines of TensorRT, looked into.
    "artifacts.digest_cache": "random weights whose digests are known",
    "backends.builder": "what each engine's build took",
    "backends.tensorrt": "events of the device, to time its share of a step",
    "backends.tensorrt.compat": "what this version of the library can do",
    "backends.tensorrt.layers": "layers in which two builds differ",
    "backends.tensorrt.program": "an engine of a graph that is no block",
    "backends.tensorrt.tactics": "records of tactics",
    "weights.adapters": "adapters that lie in memory",
    "targets": "which precisions have quantised weights",
    "verify.metrics": "how far logits are apart",
}
