"""Measures, each defined once and used everywhere. `retrieval`: how well blocks were chosen."""
