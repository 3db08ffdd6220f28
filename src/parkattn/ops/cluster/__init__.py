"""Clusters of queries (k-means) and of keys (QRKC), and block borders at tiles."""
