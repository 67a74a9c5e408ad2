"""Serving: text from a trained model."""
