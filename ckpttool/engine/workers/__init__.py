"""Copying in several processes, on one machine or many."""
