"""Audit archives: a checkpoint kept for years in a form that anyone can check."""
