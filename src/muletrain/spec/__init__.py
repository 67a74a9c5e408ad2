"""Values that every room shares: frozen, JSON round trip, no torch, no effects.

Stages turn one of these into the next (request -> plan -> events -> record), and a run folder holds them all.
"""
