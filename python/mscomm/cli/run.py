"""`mscomm run`: start and watch the ranks of a job on this host."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from mscomm.cluster.deadline import join_timeout_s

_HELP = """Start SCRIPT (a .py file, a module after -m, pytest, or any program) as N ranks on this host and watch them.

Output comes in whole lines with the rank before them. When a rank fails, the others have 5 s to report, then they are
ended; the exit status is that of the first failure. With --log_dir each rank's output is also kept in
DIR/worker_<rank>.log.
"""


@click.command(
    "run",
    help=_HELP,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option("-n", "--nproc_per_node", "--nproc-per-node", "ranks", type=int, metavar="N", help="How many ranks.")
@click.option("--worker_num", "--worker-num", type=int, metavar="N", help="The same, as msrun calls it.")
@click.option("--local_worker_num", "--local-worker-num", type=int, metavar="N", help="The same: all are on this host.")
@click.option(
    "--log_dir", "--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Keep each rank's output."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int | None,
    worker_num: int | None,
    local_worker_num: int | None,
    log_dir: Path | None,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    size = _size({"-n": ranks, "--worker_num": worker_num, "--local_worker_num": local_worker_num})
    line = command_line(script, args, module)
    env = environment(size, log_dir)
    try:
        topo_timeout_s = join_timeout_s(env)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if log_dir:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.ClickException(f"--log_dir {log_dir}: {error.strerror}") from error

    from mscomm.cli.launch import CannotStart, Launch

    _open_standard_streams()
    try:
        status = Launch(line, size, env, topo_timeout_s=topo_timeout_s, log_dir=log_dir).run()
    except CannotStart as error:
        raise click.ClickException(str(error)) from error
    sys.exit(status)


def _open_standard_streams() -> None:
    """What is closed becomes /dev/null, so that no descriptor of ours takes its number."""
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) < 3:
        continue
    os.close(fd)


def _size(given: dict[str, int | None]) -> int:
    values = {name: value for name, value in given.items() if value is not None}
    if not values:
        raise click.ClickException("say how many ranks to start: mscomm run -n 4 script.py")
    if len(set(values.values())) > 1:
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        raise click.ClickException(f"{text}: these must be equal, because all ranks run on this host")
    name, size = next(iter(values.items()))
    if size < 1:
        raise click.ClickException(f"{name} {size}: a job needs at least 1 rank")
    return size


def command_line(script: str, args: tuple[str, ...], module: bool) -> list[str]:
    """What each rank executes; ClickException if that cannot be started."""
    if module:
        return [sys.executable, "-m", script, *args]
    if script == "pytest":
        return [sys.executable, "-m", "pytest", *args]
    if script.endswith(".py"):
        if not Path(script).is_file():
            raise click.ClickException(f"there is no script {script} (in {Path.cwd()})")
        return [sys.executable, script, *args]
    program = shutil.which(script)
    if program is None:
        raise click.ClickException(f"{script} is neither a .py file nor a program that can be executed")
    return [program, *args]


def environment(size: int, log_dir: Path | None) -> dict[str, str]:
    """The ranks' environment, but for what tells them apart."""
    env = dict(os.environ)
    cpus = len(os.sched_getaffinity(0))
    if "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = str(max(1, cpus // size))
        threads = env["OMP_NUM_THREADS"]
        click.echo(f"mscomm run: OMP_NUM_THREADS={threads} for each rank ({cpus} CPUs, {size} ranks)", err=True)
    env.setdefault("PYTHONUNBUFFERED", "1")  # a line is shown when it is printed, and not lost when the rank is killed
    if log_dir:
        env.setdefault("MSCOMM_RECORD", str(log_dir.absolute()))
    return env
