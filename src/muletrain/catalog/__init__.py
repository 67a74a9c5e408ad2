"""What is known beforehand: GPUs and model shapes as data files, each number with its source."""
