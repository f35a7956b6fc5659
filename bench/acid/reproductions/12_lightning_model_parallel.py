# Lightning: lightning.pytorch's consolidate_checkpoint stops at what ModelParallelStrategy saved (needs kit.tar.xz)
import runpy, sys, tarfile

tarfile.open("kit.tar.xz").extractall("kit", filter="data")
sys.argv = ["consolidate_checkpoint", "kit/cases/lightning/ckpt", "--output_file", "out.ckpt"]
try:
    runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
except KeyError as e:
    print("KeyError:", e)
