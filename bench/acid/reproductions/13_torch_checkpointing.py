# torch_checkpointing: a flipped bit is loaded, although the zip has a CRC32, and metadata.pkl executes what it says (needs kit.tar.xz)
import os, tarfile, torch, torch.distributed as dist
from safetensors.torch import load_file
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

tarfile.open("kit.tar.xz").extractall("kit", filter="data")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = CheckpointManager.Config.with_sync_save()
config.items = {"model": ItemSpec(resharder=DefaultResharder())}
config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
wanted = load_file("kit/cases/tc_fsdp/expected.safetensors")
wanted = {k[6:]: t for k, t in wanted.items() if k.startswith("model.")}
for case in ("tc_flip", "tc_malicious"):
    into = {"model": {k: torch.zeros_like(t) for k, t in wanted.items()}}
    found = CheckpointManager(config).load(f"kit/cases/{case}/ckpt", into)["model"]
    print(case, "others:", [k for k in wanted if not torch.equal(found[k], wanted[k])])
print("executed:", os.path.exists("acid-canary"))
os._exit(0)
