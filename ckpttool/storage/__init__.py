"""Bytes in and bytes out, of local folders, object stores and the Hub; what is written appears whole or not at all."""
