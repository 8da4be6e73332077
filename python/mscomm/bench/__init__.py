"""What `mscomm bench` measures with. A collective is a row in table.py, a peer to compare with one in peers.py."""
