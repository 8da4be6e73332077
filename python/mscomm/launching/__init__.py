"""Starting ranks as processes, watching them and showing their output: for `mscomm run` and for mscomm.launch."""
