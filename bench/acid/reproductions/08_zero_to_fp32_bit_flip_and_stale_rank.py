# DeepSpeed zero_to_fp32: neither a flipped bit nor a rank of another step is noticed (needs kit.tar.xz)
import tarfile, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read
from safetensors.torch import load_file

tarfile.open("kit.tar.xz").extractall("kit", filter="data")
wanted = load_file("kit/cases/zero3_groups/expected.safetensors")
for case in ("zero3_flip", "zero3_stale"):
    found = read(f"kit/cases/{case}/ckpt")
    print(case, "other weights:", [k for k, t in found.items() if not torch.equal(t, wanted[f"model.{k}"])][:2])
