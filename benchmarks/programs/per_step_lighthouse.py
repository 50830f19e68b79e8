"""torchft's lighthouse with DLAC's settings, for benchmarks/per_step.py: `per_step_lighthouse.py PORT [ADDRESS]`."""

import signal
import sys

from dlac_pipeline.extensions.replicas.lighthouse import make_server

if __name__ == "__main__":
    server = make_server(*sys.argv[2:], port=int(sys.argv[1]), stragglers_s=60.0)
    while True:
        signal.pause()
