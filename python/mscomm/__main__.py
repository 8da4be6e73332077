"""`python -m mscomm` is the command `mscomm`."""

from mscomm.cli import main

main(prog_name="mscomm")
