"""The control plane: who belongs to the job, who failed first, and the connections that the data then uses."""
