"""Attention over the kept blocks, and dense attention."""
