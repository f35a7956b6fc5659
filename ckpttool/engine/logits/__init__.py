"""Two checkpoints as models: run layer by layer on the same tokens, and compared by what they compute."""
