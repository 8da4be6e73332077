"""What `mscomm bench` measures with. A collective to measure is a row in table.py, a peer to compare with one in peers.py."""
