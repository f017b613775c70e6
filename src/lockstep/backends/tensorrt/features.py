"""What versions of TensorRT have, where they differ: the table that `compat.Library.has` reads."""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True)
class Feature:
    """A feature of versions from `since` on, below `until` (None: all later ones). needs: its attributes."""

    since: Version
    until: Version | None
    needs: tuple[str, ...]


FEATURES: dict[str, Feature] = {
    # Explicit batch is a flag up to 8.x; later it is the only kind of network.
    "explicit_batch_flag": Feature((8, 6), (10, 0), ("NetworkDefinitionCreationFlag.EXPLICIT_BATCH",)),
    # Precision from the graph's types alone. Without it: a builder flag, and a constraint on each layer.
    "strong_types": Feature((10, 0), None, ("NetworkDefinitionCreationFlag.STRONGLY_TYPED",)),
    "precision_constraints": Feature(
        (8, 6),
        (10, 0),
        ("BuilderFlag.FP16", "BuilderFlag.OBEY_PRECISION_CONSTRAINTS", "ILayer.precision", "ILayer.set_output_type"),
    ),
    # Takes kernels that accumulate fp16 products in fp16, unless its compiler is told not to; it has no setting for
    # that, only its flags.
    "fp16_sums": Feature((8, 6), (10, 0), ()),
    # What is in fused regions stands in the plan alone, as text (regions.py); the part of a timing cache that it is
    # chosen by may be refused.
    "hidden_regions": Feature((8, 6), (10, 0), ()),
    # Takes a whole graph as one fused region where a Gather of fp16 numbers follows; else only after trying many ways
    # to divide it (one_region.py).
    "one_region": Feature((8, 6), (10, 0), ()),
    # Several contexts of one profile: asked for when the engine is built; later it is always so.
    "profile_sharing_flag": Feature(
        (8, 6), (10, 0), ("IBuilderConfig.set_preview_feature", "PreviewFeature.PROFILE_SHARING_0806")
    ),
    "bf16": Feature((10, 0), None, ("DataType.BF16",)),
    "int64": Feature((10, 0), None, ("DataType.INT64",)),  # earlier, int64 inputs become int32
    "int4": Feature((10, 0), None, ("DataType.INT4",)),
    "cache_miss_error": Feature((10, 0), None, ("BuilderFlag.ERROR_ON_TIMING_CACHE_MISS",)),
    # Timing caches whose entries can be read: which tactic was chosen for what.
    "editable_cache": Feature(
        (10, 8),
        None,
        (
            "BuilderFlag.EDITABLE_TIMING_CACHE",
            "ITimingCache.queryKeys",
            "ITimingCache.query",
            "TimingCacheValue.tacticHash",
        ),
    ),
    "opset_18": Feature((10, 0), None, ()),  # 8.6 parses it without a word, and reduces over other axes
    # Contexts whose scratch memory the caller owns.
    "context_without_memory": Feature((8, 6), (10, 0), ("ICudaEngine.create_execution_context_without_device_memory",)),
    "context_strategy": Feature((10, 0), None, ("ExecutionContextAllocationStrategy.USER_MANAGED",)),
    "memory_size": Feature((8, 6), (10, 1), ("ICudaEngine.device_memory_size",)),
    "memory_size_v2": Feature(
        (10, 1), None, ("ICudaEngine.device_memory_size_v2", "IExecutionContext.set_device_memory")
    ),
}


def available(feature: Feature, of: Version) -> bool:
    return feature.since <= of and (feature.until is None or of < feature.until)
