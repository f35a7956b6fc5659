"""Checks of one checkpoint that look for what is wrong, and say what to do."""
