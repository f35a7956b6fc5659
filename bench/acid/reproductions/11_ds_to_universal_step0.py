# DeepSpeed ds_to_universal: a checkpoint that was saved before the first step ends in KeyError: 0 (needs kit.tar.xz)
import tarfile
from argparse import Namespace
from deepspeed.checkpoint.ds_to_universal import main

tarfile.open("kit.tar.xz").extractall("kit", filter="data")
how = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False)
try:
    main(Namespace(input_folder="kit/cases/zero3_step0/ckpt/global_step0", output_folder="out", **how))
except KeyError as e:
    print("KeyError:", e)
