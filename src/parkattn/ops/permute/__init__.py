"""Tokens in block order, and back."""
