"""Replica groups: a run whose groups train on when a group dies. See docs/design/0029-replica-groups.md."""
