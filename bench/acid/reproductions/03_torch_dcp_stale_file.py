# torch.distributed.checkpoint: nothing ties a .distcp file to its .metadata; that of another step is loaded
import shutil, torch, torch.distributed.checkpoint as dcp

for step in (1, 2):
    dcp.save({"w": torch.full((4,), float(step)), "step": step}, checkpoint_id=f"step-{step}", no_dist=True)
shutil.copy("step-1/__0_0.distcp", "step-2/__0_0.distcp")
dcp.load(state := {"w": torch.zeros(4)}, checkpoint_id="step-2", no_dist=True)
print("step-2 has", state["w"])
