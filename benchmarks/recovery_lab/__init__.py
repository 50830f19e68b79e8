"""What benchmarks/recovery.py and benchmarks/recovery_daemon.py have in common."""
