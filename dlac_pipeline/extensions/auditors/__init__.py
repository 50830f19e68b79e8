"""What auditors use beside the audit: SQL over the tables, and records of exact audits."""
