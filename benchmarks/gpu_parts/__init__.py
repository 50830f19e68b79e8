"""The parts of `benchmarks.gpu`: each measures one thing on the device of this node, or on the CPU without an accelerator."""
