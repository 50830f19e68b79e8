"""State that ranks share out among them: FSDP2 and DTensor."""
