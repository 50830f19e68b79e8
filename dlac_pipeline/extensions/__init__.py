"""Extensions of the core, one folder each. The core imports none of them, and none imports another."""
