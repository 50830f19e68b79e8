"""Row groups -> live rows -> batches of tensors."""
