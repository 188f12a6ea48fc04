"""Command line of the coordinator. A command's module is imported when the command runs.

So `--help` does not pay for the gRPC and HTTP stacks.
"""

import importlib

import click

from stagemesh.version import SOFTWARE_VERSION

_COMMANDS = {
    "serve": "Serve models on the nodes that register here.",
    "up": "Run a whole cluster on this machine.",
    "generate": "Answer one prompt, on a running or a passing local cluster.",
    "plan": "Show who would run what and how fast, before anything loads.",
    "status": "Show a running cluster's nodes, models and placement.",
}


class _LazyGroup(click.Group):
    """Knows its commands' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"coordinator.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup)
@click.version_option(SOFTWARE_VERSION)
def main() -> None:
    """Place a model over several machines and serve it through an OpenAI-compatible API."""
