"""Byte formats that several layouts share: pickles, torch's zip files, safetensors headers, values as JSON."""
