"""The Hugging Face Hub: `ckpttool push` and `ckpttool pull`."""
