"""A disk that refuses, for real: the kernel lets no file grow beyond a limit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SCRIPT = """
import json, resource, sys
from pathlib import Path
import torch
from nvalchemi.errors import CheckpointError
from nvalchemi.testing import state_differences
from nvalchemi.training import Every, TrainingStage, layout, on
from nvalchemi.training.hooks import CheckpointHook, EMAHook
from tests.training.hooks.runs import batches, network, strategy

folder, behind = Path(sys.argv[1]), sys.argv[2] == "behind"
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

@on(TrainingStage.STEP_END)
def fill(ctx):
    if ctx.progress.step == 5:
        next(hook for hook in ctx.hooks if isinstance(hook, CheckpointHook)).settle()  # the checkpoint of step 3 is there
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

def run(folder, *hooks, **settings):
    model = network()
    hooks = [EMAHook(0.9), *hooks, CheckpointHook(folder, Every(steps=3), async_save=behind)]
    ctx = strategy(model, hooks, **settings)
    return ctx, model

torch.set_num_threads(1)
broken, model = run(folder, fill, num_steps=6)
said = None
try:
    broken.run(batches())
except CheckpointError as error:
    said = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
left = sorted(path.name for path in folder.iterdir())
whole, expected = run(folder.parent / "whole", num_steps=6)
whole.run(batches())
same = list(state_differences(expected.state_dict(), model.state_dict())) == []
rest, resumed = run(folder, num_steps=6, resume_from="latest")
rest.run(batches())
again = list(state_differences(expected.state_dict(), resumed.state_dict())) == []
print(json.dumps({"said": said, "left": left, "same": same, "again": again}))
"""


@pytest.mark.parametrize("how", ["waiting", "behind"])
def test_it_is_told_and_nothing_is_lost(tmp_path, how):
    """The weights are those of the step, the checkpoint before is whole, and the run goes on from it when there is room again."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert "could not be written" in seen["said"] and "do this: free space" in seen["said"]
    assert seen["left"] == ["step-00000003"]
    assert seen["same"] and seen["again"]
