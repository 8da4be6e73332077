"""`mscomm sched`: runs the scheduler of a job, like a training script that is started with MS_ROLE=MS_SCHED."""

from __future__ import annotations

import os

import click

from mscomm.bootstrap import ms_cluster
from mscomm.cluster.protection import of_command
from mscomm.errors import Error


@click.command("sched")
@click.option("--permit-plain", is_flag=True, help="Let anyone who can reach the port join, even from other machines.")
def command(permit_plain: bool) -> None:
    """Serve one job at MS_SCHED_HOST:MS_SCHED_PORT for MS_WORKER_NUM workers. The exit status is 1 if the job failed.

    With MS_ENABLE_RECOVERY=1, a lost worker can join again with the same MS_NODE_ID, as long as another worker is still
    running. The other workers call mscomm.rejoin().
    """
    try:
        ms_cluster.serve(os.environ, of_command(os.environ, permit_plain, "mscomm sched --permit-plain"))
    except (Error, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
