"""The low-rank part of dense attention that sparse attention misses."""
