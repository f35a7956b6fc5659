# DeepSpeed zero_to_fp32 and ds_to_universal: a model file executes what it says (torch.load with weights_only=False; needs kit.tar.xz)
import os, tarfile
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read

tarfile.open("kit.tar.xz").extractall("kit", filter="data")
read("kit/cases/zero3_malicious/ckpt")
print("executed:", os.path.exists("acid-canary"))
