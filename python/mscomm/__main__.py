"""Makes `python -m mscomm` run the command `mscomm`."""

from mscomm.cli import main

main(prog_name="mscomm")
