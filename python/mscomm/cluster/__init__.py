"""The control plane: registers the job's ranks, finds the first failure, and sets up the connections for the data."""
