"""The command `mscomm` and its subcommands. The module of a subcommand is imported only when the subcommand is used."""

from __future__ import annotations

import importlib

import click

from mscomm import __version__

# For each subcommand: its module, and one line of help.
COMMANDS = {
    "run": ("mscomm.cli.run", "Start and watch the ranks of a job on this host."),
    "doctor": (
        "mscomm.cli.doctor",
        "Check this machine: what is installed, what is missing, and whether two ranks can talk.",
    ),
    "sched": ("mscomm.cli.sched", "Run the scheduler of a job that is started with MS_* variables."),
    "bench": ("mscomm.cli.bench", "Benchmark a collective, alone or against gloo and MPI."),
    "certs": ("mscomm.cli.certs", "Make the certificates of a job with TLS."),
    "data": ("mscomm.cli.data", "Create a small set of real images in the CIFAR-10 binary format."),
    "ranktable": ("mscomm.cli.ranktable", "Write and check rank tables, the Ascend files that map ranks to devices."),
    "trace": ("mscomm.cli.trace", "Show which rank waited for which, from the records of a failed job."),
}


class _Lazy(click.Group):
    """Imports the module of a subcommand only when the subcommand is used. The subcommand is the module's `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="mscomm %(version)s")
def main() -> None:
    """Collective communication and data-parallel training: `mscomm run -n 4 train.py`."""
