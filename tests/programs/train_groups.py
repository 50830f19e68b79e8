"""`train_tiny.py` in a script that initializes the process group itself, before the training run does."""

import runpy
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
runpy.run_path(str(Path(__file__).with_name("train_tiny.py")), run_name="__main__")
