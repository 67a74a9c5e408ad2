"""Text to micro-batches: read by content, tokenized once, packed exactly, dealt by look-up. Only batch.py and stream.py need torch."""
