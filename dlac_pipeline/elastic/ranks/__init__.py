"""The ranks of an attempt as processes of this node: their start, reports and end."""
