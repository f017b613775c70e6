"""The split export: from a checkpoint's config.json to weight-free graphs and the recipe that assembles them."""

from lockstep.split.export import export

__all__ = ["export"]
