"""Bytes from the files of a source to those of a draft, and digests of them on the way."""
