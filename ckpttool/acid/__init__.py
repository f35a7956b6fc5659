"""The acid test: small checkpoints that are whole and that are broken, and what a program makes of each."""
