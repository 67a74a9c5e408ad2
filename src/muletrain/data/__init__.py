"""Text to micro-batches: read by content, tokenized once, packed exactly, dealt by look-up. Torch only in batch and stream."""
