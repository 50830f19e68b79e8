"""The parts of `benchmarks.gpu`: each measures one thing on the device of this machine, the CPU where there is no accelerator."""
