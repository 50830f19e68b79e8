"""The ranks of an attempt as processes of this machine: how they start, what they tell, how they end."""
