"""Into a live training job: any layout through torch.distributed.checkpoint, or with its optimizer at once."""
