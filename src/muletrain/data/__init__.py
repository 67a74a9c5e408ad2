"""Text to micro-batches: read by content, tokenized once, packed exactly, dealt by look-up. Only batch and stream need torch."""
