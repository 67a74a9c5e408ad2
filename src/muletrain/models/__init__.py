"""Models: Hugging Face decoders built on the meta device, their attention, loss, first values and saved folders."""
