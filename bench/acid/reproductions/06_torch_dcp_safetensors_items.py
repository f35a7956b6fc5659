# torch.distributed.checkpoint: FileSystemReader cannot read what FileSystemWriter wrote with SerializationFormat.SAFETENSORS
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

writer = FileSystemWriter("ck", serialization_format=SerializationFormat.SAFETENSORS)
dcp.save({"w": torch.arange(4.0)}, storage_writer=writer, no_dist=True)
try:
    dcp.load({"w": torch.zeros(4)}, checkpoint_id="ck", no_dist=True)
except dcp.CheckpointException as e:
    print(*(f"{type(error).__name__}: {str(error)[:60]}" for error, _ in e.failures.values()))
