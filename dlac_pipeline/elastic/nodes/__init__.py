"""Knowledge of one node about its run, over the store that all nodes share.

Names in the store, as docs/design/0011-nodes.md explains them:

slots               the last slot: each connection of a node takes the next one
node/SLOT           a node's record: its offer while it waits for a round, its message to the leader during one
lease               the leader's record: its slot, its round, its message to all, the end of the run
member/SLOT         the part of the last round's plan for the node in SLOT
round/N/SLOT        the plan of round N as the leader in SLOT formed it
round/N/SLOT/...    the announcements of that leader
"""
