"""Megatron-LM's files of ranks, from before torch_dist."""
