"""Tier classifier: training, evaluation and the shipped weights (JSON, never pickle)."""
