"""Maintenance of DLAC's own tables: compaction, expiry of snapshots, and deletion of orphan files."""
