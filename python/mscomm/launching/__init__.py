"""Starts ranks as processes, watches them and shows their output, for `mscomm run` and mscomm.launch."""
