"""Common parts of benchmarks/recovery.py and benchmarks/recovery_daemon.py."""
