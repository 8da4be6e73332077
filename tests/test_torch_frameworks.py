"""Frameworks over torch.distributed with the backend mscomm: 20 training steps give the same bits as over gloo.

`make test-torch` installs the frameworks. Two ranks add the same two numbers with both backends.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from warm import torchrun  # noqa: E402

DATA = """
import sys, torch, torch.distributed as dist
backend, out = sys.argv[1:]
torch.manual_seed(0)
rows = torch.randn(80, 4)
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4)
"""
LIGHTNING = """
import lightning
from lightning.pytorch.strategies import DDPStrategy
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    def training_step(self, batch, index):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)  # also averages counts, which are integers
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)
net, how = Net(), {"accelerator": "cpu", "devices": 2, "strategy": DDPStrategy(process_group_backend=backend)}
off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = lightning.Trainer(max_epochs=2, **how, **off)
trainer.fit(net, loader)
assert trainer.global_step == 20 and dist.get_backend() == backend
torch.save([*net.parameters(), trainer.callback_metrics["loss_epoch"]], f"{out}.{trainer.global_rank}")
"""
ACCELERATE = """
from accelerate import Accelerator
dist.init_process_group(backend)
accelerator = Accelerator(cpu=True)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.05), loader)
losses = []
for _ in range(2):
    for x, y in loader:
        loss = (net(x) - y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()[None]))
        losses.append(accelerator.reduce(loss.detach(), "mean"))
assert len(losses) == 40 and accelerator.num_processes == 2 and dist.get_backend() == backend
torch.save([*net.parameters(), *losses], f"{out}.{accelerator.process_index}")
accelerator.end_training()
"""


@pytest.mark.parametrize(("framework", "body"), [("lightning", LIGHTNING), ("accelerate", ACCELERATE)])
def test_20_steps_give_the_bits_of_gloo(framework: str, body: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    script = tmp_path / "script.py"
    script.write_text(DATA + body)
    for backend in ("gloo", "mscomm"):
        done = torchrun(2, script, backend, tmp_path / backend)
        assert done.returncode == 0, done.stderr
    for rank in range(2):
        theirs, ours = (torch.load(tmp_path / f"{backend}.{rank}") for backend in ("gloo", "mscomm"))
        assert len(theirs) == len(ours) > 4 and all(map(torch.equal, theirs, ours))
