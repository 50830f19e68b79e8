"""Jobs on a whole lakehouse: upkeep, verification, rehearsals."""
