"""The group of commands that handles errors for all of them."""

from __future__ import annotations

from typing import Any

import click

from lockstep.cli.extras import missing_package
from lockstep.errors import guard

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class GuardedGroup(click.Group):
    """A command group that turns users' mistakes into one line and an exit code.

    Ctrl-C too, before click makes something else of it. A package of an extra that is not installed is a mistake, too.
    """

    def invoke(self, ctx: click.Context) -> Any:
        with guard():
            try:
                return super().invoke(ctx)
            except ModuleNotFoundError as error:
                if (missing := missing_package(ctx.invoked_subcommand, error)) is None:
                    raise
                raise missing from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # as they are written below, which is the order of the stages
