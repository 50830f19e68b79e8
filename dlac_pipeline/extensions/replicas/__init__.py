"""Replica groups: a run whose groups train on when one of them dies. See docs/design/0029-replica-groups.md."""
