"""ckpttool: move training checkpoints between layouts and world sizes, bit for bit, in constant memory."""
