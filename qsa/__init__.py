"""QSA: serves long-context language models with hierarchical sparse attention, on Ray. Imports nothing."""

__version__ = "0.1.0"
