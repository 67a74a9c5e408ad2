"""Measurements on one GPU; scripts/gpu_check is their command."""
