"""Benchmarks: what training itself costs, measured by training, as tables with their hardware."""
