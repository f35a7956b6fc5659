"""The version of ckpttool, said once."""

__version__ = "1.0.0rc1"
