"""mscomm: collective communication and data-parallel training for Python. Start with `mscomm.init()`; see README.md."""
