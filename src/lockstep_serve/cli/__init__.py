"""The commands that start a server: `lockstep` finds them by entry points."""
