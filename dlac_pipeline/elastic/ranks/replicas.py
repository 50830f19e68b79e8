"""Variables that the supervisor sets for replica groups."""

LIGHTHOUSE_VARIABLE = "DLAC_LIGHTHOUSE"
"""Variable with the address of the lighthouse, which forms the quorums of the replica groups."""
REJOINS_VARIABLE = "DLAC_REJOINS"
"""Variable that is set in a process that replaces a dead one of the same attempt."""
