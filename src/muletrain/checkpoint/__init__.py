"""Checkpoints: training state and model on disk, complete at every instant, read back on any number of workers."""
