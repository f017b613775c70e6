"""Benchmarks: each writes JSON with the hardware and the versions it ran on.

Comparisons run side by side in one process, in turn.

What a user can do is measured through the public API, `import lockstep`. Below it only the modules of `INSIDE` are
imported; tests/unit/repository/test_api.py holds the list.
"""

# Module of lockstep: why the public API does not do.
INSIDE = {
    # `measure`: records are written, and manifests read, as the package does it.
    "artifacts.files": "JSON, digests, files written whole or not at all",
    "backends.cpu": "the number of threads",
    # `__main__`
    "cli.guarded": "`python -m benchmarks` ends with one line on a mistake, as `lockstep` does",
    # `invariance`
    "verify.golden.drafted": "drafts with errors planted",
    # `serving` and `throughput`
    "serve.bodies": "a server on engines that are of no target",
    "serve.run": "the same",
    "serve.service": "the same",
    "serve.settings": "the same",
    "runtime.scheduler": "what the scheduler's share of a step takes",
    "step.pages": "a pool of pages for the scheduler alone",
    # `batches`
    "step.logits_pipeline": "parameters of a slot, without a request",
    # `tiny`: exports of shapes and of tiny models, which are no checkpoints.
    "config.packing": "which checkpoints are packed",
    "artifacts.document": "what a document is refused with",
    "export.language": "the config of a model of its settings",
    "export.parity": "depths at which a model has all its kinds of layers",
    "export.quiet": "transformers says nothing while it is timed",
    "export.small_configs": "a config as small as its class takes it",
    "export.torch_model": "transformers' model to compare with ours",
    "export.tracer": "a model without weights, to see its layers",
    "export.unique_layers": "which layers are alike",
    # On a GPU: weights that are made up, builds and engines looked into.
    "artifacts": "formats of manifests that are made up",
    "provenance.code_identity": "a row of other code is measured again",
    "manifests.digest_cache": "random weights whose digests are known",
    "artifacts.assembly": "blocks with their weights",
    "artifacts.dtypes": "weights that are made up, by their types",
    "artifacts.quantized": "weights that are made up, of integers and scales",
    "backends.base": "what a backend says of itself, and the default options of a build",
    "gpu": "events of the device, to time its share of a step",
    "gpu.executor": "the parts of a step, each repeated alone",
    "gpu.plan": "the same",
    "gpu.ranks.rank": "the same",
    "gpu.runner": "the same",
    "onnx_tools.judge": "how far logits are apart",
    # `certify`: answers are drawn again, and endpoints imitated, without a server.
    "artifacts.certificate": "the questions",
    "artifacts.places": "hypotheses as a file entry",
    "certify.run": "a whole certification, of peers",
    "certify.client": "what an endpoint answers",
    "certify.likelihood": "whether answers are an alarm",
    "certify.answers": "the same",
    "verify.golden.model": "transformers' model to plant faults in",
    "verify.golden.teacher_forced": "its logits",
    # `models` and `gpu`
    "tolerances": "how far they may be",
}
