"""The group of commands that handles errors for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from lockstep.cli.extras import missing_package
from lockstep.errors import guard

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True}


class GroupedCommand(click.Command):
    """A command whose help lists options below titles.

    groups: {title: names of its options, without dashes}; the other options are below "Options".
    """

    groups: Mapping[str, str] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {
            param.opts[0]: record
            for param in self.get_params(ctx)
            if (record := param.get_help_record(ctx)) is not None
        }
        for title, names in self.groups.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(f"--{name}") for name in names.split()])
        with formatter.section("Options"):
            formatter.write_dl(list(records.values()))


class GuardedGroup(click.Group):
    """A command group whose errors are one line and an exit code, also Ctrl-C and a package not installed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sections: dict[str, tuple[click.Command, ...]] = {}

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        # click prints `--help` while it makes the context, and the disk that stdout goes to may be full.
        with guard():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with guard():
            try:
                return super().invoke(ctx)
            # Commands import their packages inside, so one of a missing extra fails only here.
            except ModuleNotFoundError as error:
                if (missing := missing_package(ctx.invoked_subcommand, error)) is None:
                    raise
                raise missing from None

    def add_section(self, title: str, commands: Iterable[click.Command]) -> None:
        """Add commands, which the help lists below `title` in this order."""
        added = tuple(commands)
        self.sections[title] = added
        for command in added:
            self.add_command(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.sections:
            return super().format_commands(ctx, formatter)
        for title, commands in self.sections.items():
            named = [(command.name or "", command) for command in commands]
            # The width that click's own list leaves for the texts: 6 columns are indents and gaps.
            width = formatter.width - 6 - max(len(name) for name, _ in named)
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(width)) for name, command in named])

    def list_commands(self, ctx: click.Context) -> list[str]:
        # In the order of `add_section`; click sorts them.
        return list(self.commands)
