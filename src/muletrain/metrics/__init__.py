"""Measuring: speed, memory, communication, and the file that events go to."""
