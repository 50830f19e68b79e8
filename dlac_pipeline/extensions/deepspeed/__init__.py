"""State of DeepSpeed engines."""
