"""The nodes that train one run: how they meet, which ranks each of them has, and what they report to the node that leads."""
