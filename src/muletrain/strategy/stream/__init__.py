"""streamed: parameters, gradients and optimizer state live in host memory, the card holds a few blocks at a time."""
