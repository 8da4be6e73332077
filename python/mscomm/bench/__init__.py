"""The measurements of `mscomm bench`. A collective is a row in table.py, a peer to compare with is one in peers.py."""
