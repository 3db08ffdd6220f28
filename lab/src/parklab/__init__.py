"""The laboratory of parkattn: other methods, videos side by side, metrics, the paper's tables, benchmarks, and the
`park` command.
"""

__version__ = "0.1.0"
