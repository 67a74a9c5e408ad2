"""Training: the composition root, the one loop, its hooks, and the entry of a worker."""
