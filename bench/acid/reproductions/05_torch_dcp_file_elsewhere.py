# torch.distributed.checkpoint: .metadata may name a file outside of the checkpoint's folder
import os, torch, torch.distributed.checkpoint as dcp

dcp.save({"w": torch.arange(4.0)}, checkpoint_id="ck", no_dist=True)
os.rename("ck/__0_0.distcp", "outside12345")
data = open("ck/.metadata", "rb").read()
open("ck/.metadata", "wb").write(data.replace(b"\x8c\x0c__0_0.distcp", b"\x8c\x0f../outside12345"))
dcp.load(state := {"w": torch.zeros(4)}, checkpoint_id="ck", no_dist=True)
print("loaded from outside:", state["w"])
