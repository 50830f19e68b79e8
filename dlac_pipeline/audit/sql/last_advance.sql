-- The last advance of the head in its first key group.
SELECT run, checkpoint_id, cut_id, key_group, block, position_start, position_end
FROM advances JOIN lineage USING (run, checkpoint_id)
WHERE is_head AND rows_consumed > 0
ORDER BY source, key_group, pass DESC, block DESC, position_end DESC
LIMIT 1;
