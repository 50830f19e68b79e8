"""A training loop of others that Shadow records: its JSON names files, folder, steps to resume, save and die, `forgets`."""

import json
import os
import signal
import sys
from pathlib import Path

import pyarrow.parquet as pq

from dlac_pipeline.extensions.loader_check import Shadow

arguments = json.loads(sys.argv[1])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = Path(arguments["folder"]) / f"position-{rank}.json"
at = json.loads(place.read_text()) if arguments["step"] else {"group": 0, "row": 0}
step = arguments["step"]
shadow = Shadow(Path(arguments["folder"]) / "shadow", step=step)
files = [pq.ParquetFile(path) for path in arguments["files"]]
groups = [(file, group) for file in files for group in range(file.num_row_groups)][rank::ranks]
while at["group"] < len(groups):
    file, group = groups[at["group"]]
    row_ids = file.read_row_group(group, columns=["row_id"])["row_id"].to_numpy()
    while at["row"] < len(row_ids):
        batch = row_ids[at["row"] : at["row"] + 10]
        at["row"] += len(batch)
        step += 1
        shadow.step(batch)
        if step == arguments["save_at"]:
            place.write_text(json.dumps({**at, "row": 0} if arguments["forgets"] else at))
        if step == arguments["die_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
    at = {"group": at["group"] + 1, "row": 0}
shadow.close()
