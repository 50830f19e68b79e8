-- The last row that the head consumed of its first key group.
CREATE OR REPLACE TEMP VIEW last_advance AS
SELECT a.* FROM advances AS a JOIN lineage AS l USING (run, checkpoint_id)
WHERE l.is_head AND a.rows_consumed > 0
ORDER BY a.source, a.key_group, a.pass DESC, a.block DESC, a.position_end DESC
LIMIT 1;
CREATE OR REPLACE TEMP VIEW last_position AS FROM consumed_at('last_advance') ORDER BY position DESC LIMIT 1;
SELECT file_path, row, checkpoint_id FROM rows_at('last_position');
