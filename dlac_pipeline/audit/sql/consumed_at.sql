-- One row per position that the advances of a relation consumed: FROM consumed_at('advances'). Dead, filtered and quarantined
-- positions are left out. A row that was read in part is consumed by the advance that finishes it.
CREATE OR REPLACE MACRO consumed_at(moved) AS TABLE
WITH dlac_spread AS (
    SELECT run, checkpoint_id, source, cut_id, plan_id, pass, key_group, block, applied,
        unnest(range(position_start, read_to)) AS position
    FROM query_table(moved)
)
FROM dlac_spread
ANTI JOIN dead_positions USING (plan_id, cut_id, key_group, block, position)
ANTI JOIN passed_over USING (run, checkpoint_id, cut_id, key_group, block, position);
