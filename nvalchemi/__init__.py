"""Train interatomic potentials and energy-based models under one strategy with hooks."""

__version__ = "0.1.0"
