# DeepSpeed ds_to_universal: ranks of other steps, copied and flipped ones are merged without a word (needs kit.tar.xz)
import tarfile
from argparse import Namespace
from deepspeed.checkpoint.ds_to_universal import main

tarfile.open("kit.tar.xz").extractall("kit", filter="data")
how = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False)
for case in ("zero3_mixed", "zero3_stale", "zero3_copied", "zero3_flip"):
    main(Namespace(input_folder=f"kit/cases/{case}/ckpt/global_step3", output_folder=case, **how))
    print(f"{case} was converted")
