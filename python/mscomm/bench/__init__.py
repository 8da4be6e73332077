"""The measurements of `mscomm bench`. Each collective is a row in table.py, and each peer is a row in peers.py."""
