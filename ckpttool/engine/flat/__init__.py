"""State in flat tensors, as FSDP1 and DeepSpeed keep it."""
