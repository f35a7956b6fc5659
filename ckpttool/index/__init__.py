"""What a checkpoint is: an index of named tensors, boxes of them, byte ranges. No bytes are read here."""
