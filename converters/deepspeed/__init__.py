"""DeepSpeed's ZeRO stages and Universal Checkpoint."""
