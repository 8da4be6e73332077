"""The control plane: which ranks belong to the job, which failed first, and the connections for the data."""
