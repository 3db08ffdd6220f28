"""Measurements: each runs a correctness gate first and returns records that say on what they were made."""
