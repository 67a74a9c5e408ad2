"""The optimizer: AdamW as one element-wise function, its state and formats, and the learning rate as a function of updates."""
